"""`bitwright canary MODEL`: the verdict that is kept for the model's shape, or a new one."""

from pathlib import Path

from bitwright.workflows.canary import canary_text, kept_verdict, run_canary, verdict_path
from bitwright.workflows.context import RunContext
from bitwright.workflows.output import Output
from bitwright.workflows.run_folder import RunFolder
from bitwright.workflows.single import ModelChoice, tell
from bitwright.workflows.spec import load_workflow
from bitwright.workflows.verbs import RunChoices, safe_name, session_options


def canary(
    workflow: str, choice: ModelChoice, out: Path | None, *, again: bool, output: Output
) -> None:
    """Show the kept verdict of a model of this shape, or measure one.

    Raises:
        BitwrightError: see the stages of a run.
    """
    spec, name = load_workflow(workflow)
    model = choice.open()
    kept = None if again else kept_verdict(model)
    if kept is not None and kept.get("target") == spec.target:
        whose = f"kept from {kept.get('model')}, of the same shape ({verdict_path(model).name})"
        tell(output, model, {**kept, "kept": True}, f"{canary_text(kept)}\n  {whose}")
        return
    folder = RunFolder.open(out or Path("runs") / f"canary-{safe_name(model.name)}")
    choices = RunChoices(threads=choice.options.threads, gpu_layers=choice.options.gpu_layers)
    reporter = output.reporter()
    ctx = RunContext(spec, name, model, folder, session_options(spec, choices), reporter)
    try:
        result = run_canary(ctx)
    finally:
        reporter.close()
    tell(output, model, {**result, "kept": False}, canary_text(result))
