"""Verbs that score, compare and show."""

from pathlib import Path
from typing import Annotated

import typer

from bitwright.cli.app import app, eval_app, workflow_app
from bitwright.cli.options import (
    Debug,
    GpuLayers,
    Json,
    Model,
    Quiet,
    Requantize,
    Threads,
    model_choice,
)
from bitwright.workflows.output import Output


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
    call_form: Annotated[
        str,
        typer.Option(help="Read tool calls as: hermes, fenced, … (else as template or answers)"),
    ] = "",
    execute_code: Annotated[
        bool, typer.Option("--execute-code", help="Run code that the model writes, in a sandbox")
    ] = False,
    calibrated_on: Annotated[
        list[Path] | None,
        typer.Option(help="Calibration text or corpus folder: items found in it are refused"),
    ] = None,
    allow_overlap: Annotated[
        bool, typer.Option("--allow-overlap", help="Score items of the calibration text")
    ] = False,
    allow_requantize: Requantize = False,
    threads: Threads = 0,
    gpu_layers: GpuLayers = 0,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Score files: tasks of a suite (--suite), or KLD against the model on a corpus (--corpus)."""
    from bitwright.workflows import single_evaluate, single_suite

    choice = model_choice(
        model, allow_requantize=allow_requantize, threads=threads, gpu_layers=gpu_layers
    )
    output = Output(json=json_, quiet=quiet)
    if bool(suite) == (corpus is not None):
        raise typer.BadParameter("give --suite NAME for tasks, or --corpus FOLDER for KLD")
    if suite:
        chosen = single_suite.SuiteChoice(
            suite, data, limit, execute_code, tuple(calibrated_on or ()), allow_overlap, call_form
        )
        single_suite.evaluate_suite(choice, files or [], chosen, out, output)
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
        bool, typer.Option("--allow-overlap", help="Score items of the calibration text")
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
    from bitwright.workflows.single_suite import SuiteChoice

    choice = model_choice(
        model, allow_requantize=allow_requantize, threads=threads, gpu_layers=gpu_layers
    )
    suites = suite or ["builtin"]
    chosen = SuiteChoice(", ".join(suites), data, limit, execute_code, (), allow_overlap)
    seed.seed_comparison(choice, run, suites, chosen, Output(json=json_, quiet=quiet))


@eval_app.command("doctor")
def eval_doctor(json_: Json = False, debug: Debug = False) -> None:
    """What is missing for running model-written code in a sandbox."""
    from bitwright.workflows import single_suite

    single_suite.show_doctor(Output(json=json_))


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
