"""What `bitwright run` does with workflows that look at many sizes: sweeps and variants."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitwright.engine.atomic import write_atomic
from bitwright.errors import ConfigError
from bitwright.report.blocks import html_page, markdown_page, terminal_text
from bitwright.report.sweep_page import sweep_page
from bitwright.report.variants_page import variants_page
from bitwright.workflows.context import RunContext
from bitwright.workflows.output import Output
from bitwright.workflows.run_folder import RunFolder
from bitwright.workflows.sizes_plan import describe_sizes
from bitwright.workflows.stage_items import check_items, suite_tasks
from bitwright.workflows.sweep import check_sweep, run_sweep
from bitwright.workflows.variants import check_variants, run_variants


def run_sizes(ctx: RunContext, model_name: str, output: Output, *, dry_run: bool) -> None:
    """Run, or only say what would be run."""
    check = check_sweep if ctx.spec.kind == "sweep" else check_variants
    check(ctx)
    tasks = suite_tasks(ctx, ctx.spec.scores)
    check_items(tasks, ctx.spec.scores)
    if dry_run:
        output.result(*describe_sizes(ctx, tasks))
        return
    opened = RunFolder.open(ctx.folder.path)
    with opened.locked():
        opened.sweep()
        _remove_leftover_files(ctx.folder)
        run = run_sweep if ctx.spec.kind == "sweep" else run_variants
        result, files = run(ctx, model_name)
        pages, text = _write_pages(ctx.folder.path, result)
    ctx.reporter.close()
    names = "\n".join(f"  {path}" for path in (*files, *pages))
    output.result(result, text, f"Files left:\n{names}")


def report_sizes(folder: Path, output: Output) -> bool:
    """Write the pages of a finished sweep or of finished builds anew; False for another folder."""
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(result, dict) or result.get("kind") not in ("sweep", "variants"):
        return False
    pages, text = _write_pages(folder, result)
    output.result(result, text, "\n".join(f"  {path}" for path in pages))
    return True


def _write_pages(folder: Path, result: Mapping[str, Any]) -> tuple[tuple[Path, ...], str]:
    """report.html and README.md, and the result as text."""
    page = sweep_page(result) if result["kind"] == "sweep" else variants_page(result)
    paths = (folder / "report.html", folder / "README.md")
    for path, text in zip(paths, (html_page(page), markdown_page(page)), strict=True):
        write_atomic(path, text.encode())
    return paths, terminal_text(page)


def _remove_leftover_files(folder: RunFolder) -> None:
    """Files that a killed run wrote only to score them."""
    for path in folder.path.glob("*/files/*.gguf"):
        path.unlink(missing_ok=True)


def refuse_ignored(ctx: RunContext, budget: str | None, *, no_measure: bool) -> None:
    """A sweep has many sizes, and both kinds measure: what would be ignored is refused.

    Raises:
        ConfigError: a budget of a sweep, or --no-measure.
    """
    if no_measure:
        raise ConfigError(
            f"--no-measure has no meaning for {ctx.name}, which is all measuring: leave it out"
        )
    if ctx.spec.kind == "sweep" and budget is not None:
        raise ConfigError(
            f"--budget {budget} has no meaning for {ctx.name}, which looks at many sizes: edit its "
            "[sweep] instead"
        )
