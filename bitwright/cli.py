"""The command line: one thin verb per stage. What a verb does is in bitwright/workflows.

stdout carries the result, stderr the progress. Exit codes: 0 done, 1 refused (one line says why),
2 usage, 130 interrupted.
"""

import io
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from bitwright import __version__
from bitwright.errors import BitwrightError
from bitwright.workflows.output import Output

if TYPE_CHECKING:  # verbs are imported when they run: --help must not load llama.cpp
    from bitwright.workflows.single import ModelChoice

app = typer.Typer(
    name="bitwright",
    help="Give it a full-precision GGUF, a task and a size: it gives back the GGUF of that size "
    "that is best at the task, and says what the gain costs elsewhere.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
workflow_app = typer.Typer(help="List and copy the built-in workflows.", no_args_is_help=True)
app.add_typer(workflow_app, name="workflow")
prior_app = typer.Typer(help="Priors: what other models' maps say.", no_args_is_help=True)
app.add_typer(prior_app, name="prior")
eval_app = typer.Typer(help="What evaluation needs.", no_args_is_help=True)
app.add_typer(eval_app, name="eval")

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="F32, F16 or BF16 GGUF (any shard), hf:owner/repo/file.gguf[@revision], or demo",
    ),
]
Requantize = Annotated[
    bool,
    typer.Option(help="Accept a quantized input; every output then says that it is synthetic"),
]
Threads = Annotated[int, typer.Option(help="CPU threads (0: all cores)", min=0)]
GpuLayers = Annotated[int, typer.Option(help="Layers to offload, if llama.cpp was built for it")]
Context = Annotated[int | None, typer.Option("--ctx", help="Tokens per chunk", min=32)]
Working = Annotated[
    str | None, typer.Option(help="Compute probes in: auto, file, F32, F16 or BF16")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON line")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, print the plan, compute nothing")
]
ImatrixFile = Annotated[
    Path | None, typer.Option(help="Importance matrix, GGUF or .dat, of any tool")
]
PriceList = Annotated[
    list[str] | None,
    typer.Option(
        "--price",
        help="CATEGORY=0.05: most KLD above the baseline's there, as a part (default 0.10); repeat",
    ),
]
Overwrite = Annotated[bool, typer.Option(help="Replace an existing output file")]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and stop", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None: ...


@app.command()
def run(
    workflow: Annotated[str, typer.Argument(help="A built-in workflow, or a .toml file")],
    model: Model,
    out: Annotated[
        Path | None, typer.Option(help="Run folder (default: runs/WORKFLOW-MODEL)")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Instead of the workflow's, e.g. '5.7 GiB'")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the workflow's", min=0)] = None,
    price: PriceList = None,
    revision: Annotated[str | None, typer.Option(help="Of an hf: model")] = None,
    allow_requantize: Requantize = False,
    keep_split: Annotated[bool, typer.Option(help="Write shards as the input has them")] = False,
    threads: Threads = 0,
    gpu_layers: GpuLayers = 0,
    ctx: Context = None,
    working_type: Working = None,
    no_measure: Annotated[
        bool, typer.Option("--no-measure", help="Damages from a shipped prior, labelled so")
    ] = False,
    dry_run: DryRun = False,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """The whole path: corpora, imatrix, damage map, layout, GGUF, scores, report."""
    from bitwright.workflows import verbs

    verbs.run(
        workflow,
        model,
        verbs.RunChoices(
            out=out,
            budget=budget,
            seed=seed,
            prices=_prices(price),
            revision=revision,
            allow_requantize=allow_requantize,
            keep_split=keep_split,
            threads=threads,
            gpu_layers=gpu_layers,
            n_ctx=ctx,
            working_type=working_type,
            no_measure=no_measure,
        ),
        dry_run=dry_run,
        output=Output(json=json_, quiet=quiet),
    )


@app.command()
def corpus(
    recipes: Annotated[list[str], typer.Argument(help="Built-in recipes or .toml files")],
    model: Model,
    out: Annotated[Path, typer.Option(help="Folder for the chunks")],
    seed: Annotated[int, typer.Option(min=0)] = 0,
    allow_requantize: Requantize = False,
    ctx: Context = None,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Recipes → documents → the model's own tokens, in four disjoint splits."""
    from bitwright.workflows import single

    choice = _choice(model, allow_requantize=allow_requantize, ctx=ctx)
    single.corpus(recipes, choice, out, seed, Output(json=json_, quiet=quiet))


@app.command()
def imatrix(
    out: Annotated[Path, typer.Option(help="Imatrix to write (.gguf, or .dat for the old format)")],
    model: Annotated[str, typer.Option("--model", "-m", help="The model, to collect one")] = "",
    corpus: Annotated[Path | None, typer.Option(help="Folder of `bitwright corpus`")] = None,
    mix: Annotated[str, typer.Option(help="Shares by tokens, e.g. code=0.7,general=0.3")] = "",
    merge: Annotated[
        list[str] | None, typer.Option(help="Instead: FILE=SHARE of an imatrix; repeat it")
    ] = None,
    chunk_size: Annotated[
        int | None, typer.Option(help="Tokens per chunk of a merged old-format file", min=1)
    ] = None,
    overwrite: Overwrite = False,
    allow_requantize: Requantize = False,
    threads: Threads = 0,
    gpu_layers: GpuLayers = 0,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Collect an importance matrix from a corpus, or merge several by shares."""
    from bitwright.workflows import single

    output = Output(json=json_, quiet=quiet)
    if merge:
        single.merge(merge, out, chunk_size, output, overwrite=overwrite)
        return
    if not model or corpus is None:
        raise typer.BadParameter("give --model and --corpus to collect, or --merge FILE=SHARE")
    choice = _choice(
        model, allow_requantize=allow_requantize, threads=threads, gpu_layers=gpu_layers
    )
    single.imatrix(choice, corpus, mix, out, output, overwrite=overwrite)


@app.command()
def damage(
    model: Model,
    corpus: Annotated[Path, typer.Option(help="Folder of `bitwright corpus`")],
    out: Annotated[Path, typer.Option(help="Folder for the map; a second run goes on in it")],
    imatrix: ImatrixFile = None,
    probe_type: Annotated[str, typer.Option(help="Degrade each tensor to this type")] = "Q2_K",
    minutes: Annotated[float | None, typer.Option(help="Spend no more minutes", min=0)] = None,
    tokens: Annotated[int | None, typer.Option(help="Decode no more tokens", min=1)] = None,
    budget: Annotated[
        str | None, typer.Option(help="Race to the layout of this size, as in `allocate`")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Category that the race is for (the corpus's first)")
    ] = None,
    ladder: Annotated[str, typer.Option(help="Types that the race decides between")] = "K",
    tolerance: Annotated[
        float, typer.Option(help="Part of the damage that open decisions may cost", min=0, max=1)
    ] = 0.02,
    stride: Annotated[int, typer.Option(help="Score every n-th row", min=1, max=64)] = 1,
    way: Annotated[str, typer.Option(help="single, groups or upgrades")] = "single",
    experts: Annotated[
        str | None, typer.Option(help="Measure this tensor's experts one at a time")
    ] = None,
    export: Annotated[Path | None, typer.Option(help="Tidy table, .csv or .parquet")] = None,
    allow_requantize: Requantize = False,
    threads: Threads = 0,
    gpu_layers: GpuLayers = 0,
    working_type: Working = None,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """What each tensor costs on each category, in nats of KLD, with standard errors."""
    from bitwright.workflows import single_damage

    choice = _choice(
        model,
        allow_requantize=allow_requantize,
        threads=threads,
        gpu_layers=gpu_layers,
        working_type=working_type,
    )
    request = single_damage.DamageRequest(
        probe_type=probe_type,
        stride=stride,
        minutes=minutes,
        tokens=tokens,
        tolerance=tolerance,
        budget=budget,
        target=target,
        ladder=ladder,
        way=way,
        expert_tensor=experts,
        export=export,
    )
    output = Output(json=json_, quiet=quiet)
    single_damage.damage(choice, corpus, imatrix, request, out, output)


@app.command()
def allocate(
    model: Model,
    budget: Annotated[str, typer.Option(help="'5.7 GiB', '3.5 bpw', 'Q3_K_S + 0.12 %', bytes")],
    target: Annotated[str, typer.Option(help="Category to be best at")],
    out: Annotated[Path, typer.Option(help="Layout file to write")],
    damage: Annotated[Path | None, typer.Option(help="Folder of `bitwright damage`")] = None,
    no_measure: Annotated[
        bool, typer.Option("--no-measure", help="Without a damage map: from a prior, labelled so")
    ] = False,
    prior: Annotated[
        Path | None, typer.Option(help="With --no-measure: a prior's file, not the shipped one")
    ] = None,
    imatrix: ImatrixFile = None,
    ladder: Annotated[str, typer.Option(help="Types to choose from: K or IQ")] = "K",
    pin: Annotated[
        list[str] | None, typer.Option(help="NAME_OR_GLOB=TYPE, decided by hand; repeat it")
    ] = None,
    baseline: Annotated[str, typer.Option(help="Stock type that prices are relative to")] = "",
    price: PriceList = None,
    side_budget: Annotated[
        list[str] | None, typer.Option(help="GLOB=SIZE for the tensors it matches; repeat it")
    ] = None,
    coherent: Annotated[
        list[str] | None,
        typer.Option(help="ROLE,ROLE that share a type in each layer; repeat it"),
    ] = None,
    honest_name: Annotated[
        str, typer.Option(help="The best layout that may carry this stock name")
    ] = "",
    allow_requantize: Requantize = False,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """The layout of least predicted damage inside a size, for `quantize` or llama-quantize."""
    from bitwright.workflows import single_allocate

    if (damage is None) != no_measure:
        raise typer.BadParameter("give either --damage FOLDER, or --no-measure")
    request = single_allocate.Request(
        damage=damage,
        budget=budget,
        target=target,
        ladder=ladder,
        pins=_pairs(pin, "--pin", "NAME_OR_GLOB=TYPE"),
        baseline=baseline,
        prices=_prices(price),
        budgets=_pairs(side_budget, "--side-budget", "GLOB=SIZE"),
        coherent=tuple(tuple(one.split(",")) for one in coherent or []),
        honest=honest_name,
        prior=prior,
    )
    choice = _choice(model, allow_requantize=allow_requantize)
    single_allocate.allocate(choice, request, imatrix, out, Output(json=json_, quiet=quiet))


@prior_app.command("build")
def prior_build(
    runs: Annotated[list[Path], typer.Argument(help="Folders of `bitwright run`")],
    model: Annotated[
        list[str], typer.Option("--model", "-m", help="The runs' models, in the same order")
    ],
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    allow_requantize: Requantize = False,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Freeze what runs measured into a prior for models of the same architecture class."""
    from bitwright.workflows import single_prior

    models = [_choice(one, allow_requantize=allow_requantize) for one in model]
    single_prior.build(runs, models, out, Output(json=json_))


@prior_app.command("compare")
def prior_compare(
    run: Annotated[Path, typer.Argument(help="Folder of `bitwright run`")],
    model: Model,
    prior: Annotated[Path | None, typer.Option(help="Instead of the shipped one")] = None,
    allow_requantize: Requantize = False,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Rank correlation of a run's damage map with a prior; refused across architecture classes."""
    from bitwright.workflows import single_prior

    choice = _choice(model, allow_requantize=allow_requantize)
    single_prior.compare(run, choice, prior, Output(json=json_))


@app.command()
def canary(
    model: Annotated[str, typer.Argument(help="As --model of `run`")],
    workflow: Annotated[
        str, typer.Option(help="Its corpora, imatrix and target")
    ] = "coding-q3_k_s",
    out: Annotated[
        Path | None, typer.Option(help="Run folder (default: runs/canary-MODEL)")
    ] = None,
    again: Annotated[bool, typer.Option(help="Measure, whatever verdict is kept")] = False,
    allow_requantize: Requantize = False,
    threads: Threads = 0,
    gpu_layers: GpuLayers = 0,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Whether our layouts help a model of this shape: six files against upstream's curve."""
    from bitwright.workflows import single_canary

    choice = _choice(
        model, allow_requantize=allow_requantize, threads=threads, gpu_layers=gpu_layers
    )
    single_canary.canary(workflow, choice, out, again=again, output=Output(json=json_, quiet=quiet))


@app.command()
def quantize(
    model: Model,
    layout: Annotated[str, typer.Option(help="Layout file, or a stock type such as Q4_K_M")],
    out: Annotated[Path, typer.Option(help="GGUF to write")],
    imatrix: ImatrixFile = None,
    overwrite: Overwrite = False,
    keep_split: Annotated[bool, typer.Option(help="Write shards as the input has them")] = False,
    allow_requantize: Requantize = False,
    threads: Threads = 0,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write the GGUF of a layout, re-read it and compare each tensor's type with the plan."""
    from bitwright.workflows import single

    single.quantize(
        _choice(model, allow_requantize=allow_requantize, threads=threads),
        layout,
        imatrix,
        out,
        overwrite=overwrite,
        keep_split=keep_split,
        output=Output(json=json_, quiet=quiet),
    )


@app.command()
def evaluate(
    files: Annotated[list[Path] | None, typer.Argument(help="Quantized GGUFs, of any tool")] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="The full-precision model, or demo")
    ] = "",
    corpus: Annotated[
        Path | None, typer.Option(help="Score KLD on this folder of `bitwright corpus`")
    ] = None,
    suite: Annotated[
        str, typer.Option(help="Run tasks: builtin, code, math, chat, tool_calling or a .toml")
    ] = "",
    split: Annotated[str, typer.Option(help="calibrate, probe, select or report")] = "report",
    out: Annotated[
        Path | None, typer.Option(help="Keep every token's or item's score here")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with the tasks' files, instead of the hub")
    ] = None,
    limit: Annotated[int, typer.Option(help="At most so many items a task (0: as the suite)")] = 0,
    execute_code: Annotated[
        bool, typer.Option("--execute-code", help="Run code that the model writes, in a sandbox")
    ] = False,
    calibrated_on: Annotated[
        list[Path] | None,
        typer.Option(help="Calibration text or corpus folder: items found in it are refused"),
    ] = None,
    allow_overlap: Annotated[
        bool, typer.Option(help="Score items of the calibration text")
    ] = False,
    allow_requantize: Requantize = False,
    threads: Threads = 0,
    gpu_layers: GpuLayers = 0,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Score files: tasks of a suite (--suite), or KLD against the model on a corpus (--corpus)."""
    from bitwright.workflows import single_evaluate

    choice = _choice(
        model, allow_requantize=allow_requantize, threads=threads, gpu_layers=gpu_layers
    )
    output = Output(json=json_, quiet=quiet)
    if bool(suite) == (corpus is not None):
        raise typer.BadParameter("give --suite NAME for tasks, or --corpus FOLDER for KLD")
    if suite:
        chosen = single_evaluate.SuiteChoice(
            suite, data, limit, execute_code, tuple(calibrated_on or ()), allow_overlap
        )
        single_evaluate.evaluate_suite(choice, files or [], chosen, out, output)
        return
    if not files or not model or corpus is None:
        raise typer.BadParameter("--corpus compares FILES with --model: give both")
    single_evaluate.evaluate(choice, files, corpus, split, out, output)


@app.command()
def compare(
    results: Annotated[
        list[str],
        typer.Argument(
            help="Folders of `run` (FOLDER:LABEL for another than its chosen file) or `evaluate`"
        ),
    ],
    target: Annotated[
        str, typer.Option(help="The category that should gain; else what the results say")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Keep every item's or token's difference here")
    ] = None,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Paired differences of the first result and each of the others: target gain, off-target loss.

    Of a single run: its chosen file against its baseline.
    """
    from bitwright.workflows import single_compare

    single_compare.compare(results, Output(json=json_), target=target or None, out=out)


@app.command("seed-comparison")
def seed_comparison(
    run: Annotated[Path, typer.Argument(help="A finished run folder of `bitwright run`")],
    model: Model,
    suite: Annotated[
        list[str] | None, typer.Option(help="Suites of the target and the others; repeat it")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with the tasks' files, instead of the hub")
    ] = None,
    limit: Annotated[int, typer.Option(help="At most so many items a task (0: as the suite)")] = 0,
    execute_code: Annotated[
        bool, typer.Option("--execute-code", help="Run code that the model writes, in a sandbox")
    ] = False,
    allow_overlap: Annotated[
        bool, typer.Option(help="Score items of the calibration text")
    ] = False,
    allow_requantize: Requantize = False,
    threads: Threads = 0,
    gpu_layers: GpuLayers = 0,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Imatrix or layout: stock and our layout, each with both imatrices, on executed tasks."""
    from bitwright.workflows import seed_comparison as seed
    from bitwright.workflows.single_evaluate import SuiteChoice

    choice = _choice(
        model, allow_requantize=allow_requantize, threads=threads, gpu_layers=gpu_layers
    )
    suites = suite or ["builtin"]
    chosen = SuiteChoice(", ".join(suites), data, limit, execute_code, (), allow_overlap)
    seed.seed_comparison(choice, run, suites, chosen, Output(json=json_, quiet=quiet))


@eval_app.command("doctor")
def eval_doctor(json_: Json = False, debug: Debug = False) -> None:
    """What is missing for running model-written code in a sandbox."""
    from bitwright.workflows import single_evaluate

    single_evaluate.show_doctor(Output(json=json_))


@app.command()
def thresholds(
    runs: Annotated[list[Path], typer.Argument(help="Run folders of sweeps, or kept files")],
    fail_if: Annotated[
        list[str] | None,
        typer.Option(help="Exit with 1 if so, e.g. tool_calling.breaks_above=3.9bpw; repeat it"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Keep them in a small JSON file")] = None,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Where each category breaks, for several runs side by side; a check for CI."""
    from bitwright.workflows import single_thresholds

    if not single_thresholds.thresholds(runs, fail_if or [], out, Output(json=json_)):
        raise typer.Exit(1)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A finished run folder")],
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Write the report of a finished run anew, and show its result."""
    from bitwright.workflows import verbs

    verbs.report(folder, Output(json=json_))


@app.command()
def inspect(
    file: Annotated[str, typer.Argument(help="A GGUF, an imatrix, a layout or a run folder")],
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """What a file holds: types, bytes, bpw, share of the body in each type, provenance."""
    from bitwright.workflows import inspect as inspecting

    inspecting.inspect(file, Output(json=json_))


@workflow_app.command("ls")
def workflow_ls(json_: Json = False, debug: Debug = False) -> None:
    """List the built-in workflows."""
    from bitwright.workflows import verbs

    verbs.show_workflows(Output(json=json_))


@workflow_app.command("cp")
def workflow_cp(
    name: Annotated[str, typer.Argument(help="A built-in workflow")],
    destination: Annotated[Path, typer.Argument(help="A .toml file or a folder")] = Path(),
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Copy a built-in workflow to edit it."""
    from bitwright.workflows import verbs

    verbs.copy_builtin(name, destination, Output(json=json_))


def _pairs(entries: list[str] | None, option: str, form: str) -> dict[str, str]:
    """NAME=VALUE options as a dictionary; the last of a name holds."""
    pairs = {}
    for entry in entries or []:
        name, _, value = entry.rpartition("=")
        if not name or not value:
            raise typer.BadParameter(f"{option} {entry}: write {form}")
        pairs[name] = value
    return pairs


def _prices(entries: list[str] | None) -> dict[str, float]:
    found = {}
    for category, text in _pairs(entries, "--price", "CATEGORY=0.05").items():
        try:
            found[category] = float(text)
        except ValueError:
            found[category] = -1.0
        if not 0 <= found[category] < 1000:
            raise typer.BadParameter(f"--price {category}={text}: a part such as 0.05, from 0 up")
    return found


def _choice(
    model: str,
    *,
    allow_requantize: bool = False,
    threads: int = 0,
    gpu_layers: int = 0,
    ctx: int | None = None,
    working_type: str | None = None,
) -> "ModelChoice":
    from bitwright.engine.session import SessionOptions
    from bitwright.workflows.single import ModelChoice

    options = SessionOptions(
        threads=threads,
        gpu_layers=gpu_layers,
        n_ctx=ctx or 512,
        working_type=working_type or "auto",
    )
    return ModelChoice(model, allow_requantize, None, options)


class Interrupted(BaseException):
    """Ctrl-C. Not KeyboardInterrupt, which Typer would turn into exit code 1."""


def main() -> None:
    """Entry point: turns every refusal into one line on stderr and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a console of another code page: no crash
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGINT, _interrupt)
    try:
        app()
    except BitwrightError as error:
        if "--debug" in sys.argv:
            raise
        _fail(f"bitwright: {error}", 1)
    except OSError as error:  # a path that the system refuses, wherever it was met
        if "--debug" in sys.argv or error.filename is None:
            raise
        _fail(f"bitwright: {error.filename}: {error.strerror}; check the path", 1)
    except Interrupted:
        _fail("bitwright: interrupted; the same command goes on where it stopped", 130)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise Interrupted


def _fail(message: str, code: int) -> None:
    print(message, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
