"""Stage 7: report, model card and layout file, from nothing but what the run folder holds."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from bitwright.allocator.layout import Layout, write_layout
from bitwright.corpora.store import load_corpus
from bitwright.damage.damage_map import load_damage_map
from bitwright.engine.atomic import write_atomic
from bitwright.engine.model_file import ModelFile
from bitwright.engine.tensors import is_quantizable, layer, role
from bitwright.errors import InputError
from bitwright.report.card import model_card
from bitwright.report.extras import Prediction, ReportExtras
from bitwright.report.html import html_report
from bitwright.workflows.context import RunContext
from bitwright.workflows.run_folder import RunFolder, versions
from bitwright.workflows.spec import list_workflows, load_workflow


def describe_run(
    ctx: RunContext,
    layouts: Mapping[str, Mapping[str, str]],
    names: Mapping[str, str],
    recipe_sha256: str,
) -> dict[str, Any]:
    """What the report needs and no earlier stage has recorded; goes into evaluate.json."""
    found = [info for info in ctx.model.tensors if is_quantizable(info, ctx.model.arch)]
    return {
        "layouts": {label: dict(types) for label, types in layouts.items()},
        "names": dict(names),
        "tensors": [[i.name, role(i.name), layer(i.name), i.n_elements] for i in found],
        "recipe": {"sha256": recipe_sha256, "seed": ctx.spec.seed, **versions()},
        "base_model": base_model(ctx.model),
        "license": str(ctx.model.meta("general.license", "")),
    }


def command_of(ctx: RunContext, model_name: str) -> str:
    """The command that makes the run again, with what was changed on the command line."""
    built_in = ctx.name in {name for name, _ in list_workflows()}
    spec = load_workflow(ctx.name)[0] if built_in else ctx.spec
    workflow = shlex.quote(ctx.name if built_in else f"{ctx.name}.toml")
    parts = [f"bitwright run {workflow} --model {shlex.quote(model_name)}"]
    if ctx.spec.budget != spec.budget:
        parts.append(f"--budget {shlex.quote(str(ctx.spec.budget))}")
    if ctx.spec.seed != spec.seed:
        parts.append(f"--seed {ctx.spec.seed}")
    changed = {c: e for c, e in ctx.spec.price.items() if spec.price.get(c) != e}
    parts += [f"--price {category}={part:g}" for category, part in changed.items()]
    if ctx.spec.engine.n_ctx != spec.engine.n_ctx:
        parts.append(f"--ctx {ctx.spec.engine.n_ctx}")
    if ctx.spec.engine.working_type != spec.engine.working_type:
        parts.append(f"--working-type {ctx.spec.engine.working_type}")
    if ctx.spec.damage.mode == "prior" != spec.damage.mode:
        parts.append("--no-measure")
    return " ".join(parts)


def base_model(model: ModelFile) -> str:
    """The name that the model gives itself, else its file's."""
    return str(model.meta("general.name", model.name))


def load_result(folder: Path) -> dict[str, Any]:
    """The result.json of a finished run.

    Raises:
        InputError: the folder holds no finished run.
    """
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(
            f"{folder} has no result.json that can be read: give the folder of a run that ended"
        ) from None
    if not isinstance(result, dict) or "files" not in result:
        raise InputError(f"{folder}/result.json is no result of bitwright run: give a run folder")
    return result


def write_report(folder: RunFolder) -> list[Path]:
    """Write report.html, README.md (the model card) and layout.txt anew from the run folder."""
    result = load_result(folder.path)
    extras = load_extras(folder, result)
    layout_path = folder.path / "layout.txt"
    write_layout(Layout(extras.layouts[result["chosen"]]), layout_path)
    texts = {"report.html": html_report(result, extras), "README.md": model_card(result, extras)}
    for name, text in texts.items():
        write_atomic(folder.path / name, text.encode())
    return [layout_path, *(folder.path / name for name in texts)]


def load_extras(folder: RunFolder, result: Mapping[str, Any]) -> ReportExtras:
    """Everything that the report shows beside result.json.

    Raises:
        InputError: a stage's manifest is missing.
    """
    select, evaluate, imatrix = (
        _stage_result(folder, name) for name in ("select", "evaluate", "imatrix")
    )
    predictions = [
        Prediction(label, category, select["predicted"][label][category], measured)
        for label, by_category in select["measured"].items()
        for category, measured in by_category.items()
    ]
    corpora = load_corpus(folder.path / "corpus")
    statistics = {c: dict(corpus.statistics).get("splits", {}) for c, corpus in corpora.items()}
    return ReportExtras(
        damage_map=load_damage_map(folder.path / "damage").probe_rows,
        tensors=pd.DataFrame(
            evaluate["tensors"], columns=["tensor", "role", "layer", "n_elements"]
        ),
        layouts=evaluate["layouts"],
        names=evaluate["names"],
        predictions=predictions,
        corpora=statistics,  # type: ignore[arg-type]
        noise_nats=evaluate["noise_nats"],
        recipe=evaluate["recipe"],
        notes=[*mix_notes(result), *(f"imatrix: {n}" for n in imatrix["task"].get("notes", ()))],
        base_model=evaluate["base_model"],
        license=evaluate["license"],
        command=str(result.get("command", "")),
    )


def mix_notes(result: Mapping[str, Any]) -> list[str]:
    """What choosing the imatrix's mix came to, before or in a study; nothing where none was."""
    mixes = [result.get("imatrix_mix"), result.get("study_mix")]
    return [f"imatrix mix: {mix['sentence']}" for mix in mixes if mix]


def _stage_result(folder: RunFolder, stage: str) -> dict[str, Any]:
    manifest = folder.manifest(stage)
    if manifest is None:
        raise InputError(
            f"{folder.path} has no {stage}.json: run the workflow to its end in that folder"
        )
    result: dict[str, Any] = manifest["result"]
    return result
