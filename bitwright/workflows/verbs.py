"""What `bitwright run` and `bitwright workflow` do; the verbs of single stages are in single.py."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bitwright.allocator.terms import off_target_prices
from bitwright.engine.model_file import ModelFile, open_model
from bitwright.engine.session import SessionOptions
from bitwright.errors import ConfigError
from bitwright.report.tables import results_text
from bitwright.workflows.context import RunContext
from bitwright.workflows.dry_run import describe_plan
from bitwright.workflows.output import Output
from bitwright.workflows.pipeline import run_pipeline
from bitwright.workflows.preflight import check_room, make_plan
from bitwright.workflows.run_folder import RunFolder
from bitwright.workflows.spec import (
    MAX_CTX,
    MIN_CTX,
    WorkflowSpec,
    copy_workflow,
    list_workflows,
    load_workflow,
)
from bitwright.workflows.stage_report import load_result, write_report


@dataclass(frozen=True, slots=True)
class RunChoices:
    """What the command line may say beside the workflow and the model."""

    out: Path | None = None
    budget: str | None = None
    seed: int | None = None
    prices: Mapping[str, float] = field(default_factory=dict)
    revision: str | None = None
    allow_requantize: bool = False
    keep_split: bool = False
    threads: int = 0
    gpu_layers: int = 0
    n_ctx: int | None = None
    working_type: str | None = None
    no_measure: bool = False


def run(
    workflow: str, model_spec: str, choices: RunChoices, *, dry_run: bool, output: Output
) -> None:
    """Run a workflow on a model, or only say what it would do."""
    spec, name = load_workflow(workflow)
    model = open_model(
        model_spec, allow_requantize=choices.allow_requantize, revision=choices.revision
    )
    spec = overridden(spec, choices)
    folder = choices.out or Path("runs") / f"{name}-{safe_name(model.name)}"
    reporter = output.reporter()
    ctx = RunContext(
        spec=spec,
        name=name,
        model=model,
        folder=RunFolder(folder),
        options=session_options(spec, choices),
        reporter=reporter,
        keep_split=choices.keep_split,
    )
    try:
        if spec.kind != "build":
            # Executed suites and what they import are needed by these kinds only.
            from bitwright.workflows.sizes_verbs import refuse_ignored, run_sizes

            refuse_ignored(ctx, choices.budget, no_measure=choices.no_measure)
            run_sizes(ctx, shown_name(model_spec, model), output, dry_run=dry_run)
            return
        plan = make_plan(ctx)
        if dry_run:
            facts, text = describe_plan(ctx, plan)
            output.result(facts, text)
            return
        opened = RunFolder.open(folder)
        check_room(ctx, plan)
        with opened.locked():
            opened.sweep()
            done = run_pipeline(ctx, plan, shown_name(model_spec, model))
    finally:
        reporter.close()
    names = "\n".join(f"  {path}" for path in done.files)
    shown = results_text(done.result)
    output.result(done.result, shown, f"Files left:\n{names}")


def report(folder: Path, output: Output) -> None:
    """Write the report of a finished run anew, and show its result."""
    from bitwright.workflows.sizes_verbs import report_sizes  # needed by those kinds only

    if report_sizes(folder, output):
        return
    result = load_result(folder)
    files = write_report(RunFolder(folder))
    shown = results_text(result)
    output.result(result, shown, "\n".join(f"  {path}" for path in files))


def overridden(spec: WorkflowSpec, choices: RunChoices) -> WorkflowSpec:
    """The workflow with the command line's budget, seed, context, working type and --no-measure.

    Raises:
        ConfigError: a working type that does not exist, or a context out of range.
    """
    engine = spec.engine.model_dump()
    if choices.n_ctx is not None:
        if not MIN_CTX <= choices.n_ctx <= MAX_CTX:
            raise ConfigError(
                f"--ctx {choices.n_ctx} is not between {MIN_CTX} and {MAX_CTX} tokens per chunk: "
                "give a smaller one, such as 512"
            )
        engine["n_ctx"] = choices.n_ctx
    if choices.working_type is not None:
        known = {name.upper(): name for name in ("auto", "file", "F32", "F16", "BF16")}
        if choices.working_type.upper() not in known:
            raise ConfigError(
                f"--working-type {choices.working_type} is not one of auto, file, F32, F16, BF16"
            )
        engine["working_type"] = known[choices.working_type.upper()]
    changes: dict[str, object] = {"engine": type(spec.engine).model_validate(engine)}
    if choices.budget is not None:
        changes["budget"] = choices.budget
    if choices.no_measure:
        changes["damage"] = spec.damage.model_copy(update={"mode": "prior"})
    if choices.seed is not None:
        changes["seed"] = choices.seed
    if choices.prices:
        changes["price"] = {**spec.price, **choices.prices}
        off_target_prices(choices.prices, tuple(spec.corpora), spec.target)  # known categories only
    return spec.model_copy(update=changes)


def session_options(spec: WorkflowSpec, choices: RunChoices) -> SessionOptions:
    """How probes are computed."""
    return SessionOptions(
        threads=choices.threads,
        n_ctx=spec.engine.n_ctx,
        gpu_layers=choices.gpu_layers,
        working_type=spec.engine.working_type,
    )


def shown_name(model_spec: str, model: ModelFile) -> str:
    """How result.json names the model: never with a folder of the user's machine."""
    return model_spec if model_spec == "demo" or model_spec.startswith("hf:") else model.path.name


def safe_name(name: str) -> str:
    """A name that can be a folder anywhere."""
    return re.sub(r"[^\w.-]+", "_", name).strip("._-")[:100] or "model"


def show_workflows(output: Output) -> None:
    """The built-in workflows, one line each."""
    found = list_workflows()
    width = max((len(name) for name, _ in found), default=0)
    text = "\n".join(f"{name:<{width}}  {description}" for name, description in found)
    output.result({"workflows": dict(found)}, text)


def copy_builtin(name: str, destination: Path, output: Output) -> None:
    """Copy a built-in workflow for editing."""
    path = copy_workflow(name, destination)
    output.result({"path": str(path)}, f"{path} (run it: bitwright run {path} --model MODEL.gguf)")
