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
Overwrite = Annotated[bool, typer.Option(help="Replace an existing output file")]


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


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
    revision: Annotated[str | None, typer.Option(help="Of an hf: model")] = None,
    allow_requantize: Requantize = False,
    keep_split: Annotated[bool, typer.Option(help="Write shards as the input has them")] = False,
    threads: Threads = 0,
    gpu_layers: GpuLayers = 0,
    ctx: Context = None,
    working_type: Working = None,
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
            revision=revision,
            allow_requantize=allow_requantize,
            keep_split=keep_split,
            threads=threads,
            gpu_layers=gpu_layers,
            n_ctx=ctx,
            working_type=working_type,
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
    allow_requantize: Requantize = False,
    threads: Threads = 0,
    gpu_layers: GpuLayers = 0,
    working_type: Working = None,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """What each tensor costs on each category, in nats of KLD, with standard errors."""
    from bitwright.workflows import single

    choice = _choice(
        model,
        allow_requantize=allow_requantize,
        threads=threads,
        gpu_layers=gpu_layers,
        working_type=working_type,
    )
    output = Output(json=json_, quiet=quiet)
    single.damage(choice, corpus, imatrix, probe_type, out, output)


@app.command()
def allocate(
    model: Model,
    damage: Annotated[Path, typer.Option(help="Folder of `bitwright damage`")],
    budget: Annotated[str, typer.Option(help="'5.7 GiB', '3.5 bpw', 'Q3_K_S + 0.12 %', bytes")],
    target: Annotated[str, typer.Option(help="Category to be best at")],
    out: Annotated[Path, typer.Option(help="Layout file to write")],
    imatrix: ImatrixFile = None,
    ladder: Annotated[str, typer.Option(help="Types to choose from: K or IQ")] = "K",
    pin: Annotated[
        list[str] | None, typer.Option(help="NAME_OR_GLOB=TYPE, decided by hand; repeat it")
    ] = None,
    allow_requantize: Requantize = False,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """The layout of least predicted damage inside a size, for `quantize` or llama-quantize."""
    from bitwright.workflows import single

    pins = {}
    for entry in pin or []:
        name, _, type_name = entry.rpartition("=")
        if not name:
            raise typer.BadParameter(f"--pin {entry}: write NAME_OR_GLOB=TYPE")
        pins[name] = type_name
    single.allocate(
        _choice(model, allow_requantize=allow_requantize),
        damage,
        imatrix,
        budget=budget,
        ladder_name=ladder,
        target=target,
        pins=pins,
        out=out,
        output=Output(json=json_, quiet=quiet),
    )


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
    files: Annotated[list[Path], typer.Argument(help="Quantized GGUFs, of any tool")],
    model: Model,
    corpus: Annotated[Path, typer.Option(help="Folder of `bitwright corpus`")],
    split: Annotated[str, typer.Option(help="calibrate, probe, select or report")] = "report",
    out: Annotated[Path | None, typer.Option(help="Keep per-token scores here (resumes)")] = None,
    allow_requantize: Requantize = False,
    threads: Threads = 0,
    gpu_layers: GpuLayers = 0,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Score quantized files against the model: KLD, top-1 and perplexity, per category."""
    from bitwright.workflows import single

    choice = _choice(
        model, allow_requantize=allow_requantize, threads=threads, gpu_layers=gpu_layers
    )
    output = Output(json=json_, quiet=quiet)
    single.evaluate(choice, files, corpus, split, out, output)


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
    except Interrupted:
        _fail("bitwright: interrupted; the same command goes on where it stopped", 130)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise Interrupted


def _fail(message: str, code: int) -> None:
    print(message, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
