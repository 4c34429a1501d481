"""`bitwright prior`: make one from measured runs, and compare one with a run's map."""

import json
from collections.abc import Sequence
from pathlib import Path

from bitwright.allocator.options import build_options
from bitwright.allocator.priors import (
    Source,
    build_prior,
    find_prior,
    is_of,
    rank_correlation,
    read_prior,
    write_prior,
)
from bitwright.damage.damage_map import load_damage_map
from bitwright.damage.pricing import price_types
from bitwright.engine.model_file import ModelFile
from bitwright.errors import ConfigError, InputError
from bitwright.workflows.output import Output
from bitwright.workflows.single import ModelChoice


def build(
    folders: Sequence[Path], models: Sequence[ModelChoice], out: Path, output: Output
) -> None:
    """Run folders and their models, in the same order → one prior."""
    if len(folders) != len(models):
        raise ConfigError(
            f"{len(folders)} run(s) and {len(models)} model(s) were given: name each run's model"
            " with --model, in the same order"
        )
    sources = [measured_source(f, m.open()) for f, m in zip(folders, models, strict=True)]
    prior = build_prior(sources)
    write_prior(prior, out)
    facts = {
        "path": str(out),
        "model_class": prior.model_class,
        "sources": list(prior.sources),
        "spread": prior.spread,
    }
    text = (
        f"{out}: prior of {prior.model_class} from {len(sources)} map(s); single tensors differ"
        f" from it by a factor of {2.718281828**prior.spread:.2f}"
    )
    output.result(facts, text)


def compare(folder: Path, choice: ModelChoice, prior_path: Path | None, output: Output) -> None:
    """Rank correlation of a run's damage map and a prior, per category."""
    source = measured_source(folder, choice.open())
    prior = read_prior(prior_path) if prior_path else find_prior(source.model)
    if prior is None:
        raise ConfigError(
            f"no prior is shipped for {source.model.name}'s class: give one with --prior"
        )
    found = {
        c: rank_correlation(prior, source, c)
        for c in source.table.categories
        if c in prior.sensitivity
    }
    own = is_of(prior, source.model)
    facts = {
        "model_class": prior.model_class,
        "prior_is_of_this_model": own,
        "spearman": {c: round(value, 4) for c, (value, _) in found.items()},
        "tensors": {c: n for c, (_, n) in found.items()},
    }
    lines = [f"{c:<14} rank correlation {v:.3f} over {n} tensors" for c, (v, n) in found.items()]
    if own:
        lines.append("the prior was made from this very model: that says nothing of others")
    output.result(facts, "\n".join(lines))


def measured_source(folder: Path, model: ModelFile) -> Source:
    """A run folder's map, priced at the types whose packing errors it holds.

    Raises:
        InputError: the folder holds no finished map, or one of another model.
    """
    mapped = load_damage_map(folder / "damage")
    try:
        rows = json.loads((folder / "damage" / "packing_errors.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(
            f"{folder} has no packing errors: give the folder of a finished `bitwright run`"
        ) from None
    errors = {(tensor, kind): float(error) for tensor, kind, error in rows}
    unknown = [tensor for tensor, _ in errors if tensor not in model.by_name]
    if unknown:
        raise InputError(f"{folder} was measured on another model: it has {unknown[0]}")
    ladder = tuple(sorted({kind for _, kind in errors}))
    options = build_options(
        model, ladder=ladder, assume_imatrix=True, measured=frozenset(mapped.rows["tensor"])
    )
    offered = {
        n: tuple(t for t in types if (n, t) in errors) for n, types in options.offered.items()
    }
    table = price_types(mapped, errors, {n: t for n, t in offered.items() if t})
    n_chunks = sum(mapped.n_chunks.values())
    text = (
        f"{model.name}, {len(table.tensors)} tensors, {n_chunks} chunks of"
        f" {', '.join(table.categories)}, probed at {mapped.probe_type}"
    )
    return Source(model, table, text)
