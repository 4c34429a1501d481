"""Stage 2b: which task:general mix of the imatrix is best, by measuring instead of by taste.

Upstream's layout of the baseline is packed with each mix and measured whole on the ``select``
split. The declared task mix stays unless another is better on the target by more than the paired
interval, and costs no other category more than its declared price over the general imatrix. All
later stages, the baseline among them, then use the chosen mix as the task imatrix.

A study of layouts varies the mix too (see mixes.py), which packs the model anew for each. That it
finds more is not to be expected: on the demo model the best of six mixes is the same for ours and
for upstream's layout (benchmarks/imatrix_mix.py).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bitwright.allocator.terms import off_target_prices
from bitwright.corpora.records import Corpus
from bitwright.engine.imatrix_file import read_imatrix, write_imatrix
from bitwright.eval.divergence import Candidate, ScoreTable
from bitwright.eval.scores import kld_ratio, mean_kld
from bitwright.eval.suite import DivergenceSuite
from bitwright.workflows.context import RunContext
from bitwright.workflows.mixes import TASK, ChosenMix
from bitwright.workflows.preflight import Plan
from bitwright.workflows.run_folder import key_of
from bitwright.workflows.spec import Mix
from bitwright.workflows.stage_allocate import broken_prices
from bitwright.workflows.stage_damage import make_packer
from bitwright.workflows.stage_evaluate import score_on, split_chunks
from bitwright.workflows.stage_imatrix import Imatrices, describe_mix, mixed_imatrix

GENERAL = "general"


def choose_mix(
    ctx: RunContext,
    plan: Plan,
    corpora: Mapping[str, Corpus],
    imatrices: Imatrices,
    key: str,
    suite: DivergenceSuite,
) -> ChosenMix:
    """The task imatrix as declared, or the candidate mix that measures better."""
    if not ctx.spec.imatrix.candidates:
        return ChosenMix(imatrices, key, None, dict(ctx.spec.imatrix.task))
    mixes = named_mixes(ctx)
    found = {
        name: imatrices[name] if name in imatrices else mixed_imatrix(ctx, mix)
        for name, mix in mixes.items()
    }
    layout = plan.stock[ctx.spec.baseline]
    candidates = [
        Candidate(name, layout, make_packer(ctx, TASK, one), one.sha256())
        for name, one in found.items()
    ]
    chunks = split_chunks(ctx, corpora, "select")
    scored = score_on(ctx, "mix", candidates, chunks, ctx.options)
    target = ctx.spec.target
    measured = {
        name: {c: mean_kld(scored.table, name, c, suite) for c in ctx.categories} for name in mixes
    }
    known = {n: {c: v for c, v in by.items() if v is not None} for n, by in measured.items()}
    prices = off_target_prices(ctx.spec.price, ctx.categories, target)
    broken = {n: broken_prices(known[n], known[GENERAL], prices, scored.noise_nats) for n in mixes}
    best, ratios = pick(scored.table, tuple(mixes), broken, target, suite)
    sentence = mix_sentence(mixes, best, target, ratios)
    record = {
        "chosen": best,
        "mixes": {name: dict(mix) for name, mix in mixes.items()},
        "measured": known,
        "ratios": ratios,
        "broken_prices": broken,
        "sentence": sentence,
    }
    ctx.reporter.note(sentence)
    inputs = {"imatrix": key, "measured": known, "chosen": best}
    path = ctx.folder.file("imatrix", "chosen.gguf")

    def compute() -> tuple[dict[str, Any], list[Path]]:
        write_imatrix(found[best], path)
        return record, [path]

    ctx.folder.stage("mix", key_of("mix", inputs), compute, inputs=inputs)
    chosen = {**imatrices, TASK: read_imatrix(path)}
    key = key_of("mix-imatrix", key, chosen[TASK].sha256())
    return ChosenMix(chosen, key, record, mixes[best])


def pick(
    table: ScoreTable,
    names: Sequence[str],
    broken: Mapping[str, Mapping[str, float]],
    target: str,
    suite: DivergenceSuite,
) -> tuple[str, dict[str, dict[str, Any]]]:
    """The first name, unless a later one that keeps the prices is better beyond its interval.

    Also each later one's ratio over the best before it.
    """
    best, ratios = names[0], {}
    for name in names[1:]:
        ratio = kld_ratio(table, name, best, target, suite)
        ratios[name] = {"over": best, **ratio.as_dict()}
        if ratio.high is not None and ratio.high < 1.0 and not broken[name]:
            best = name
    return best, ratios


def named_mixes(ctx: RunContext) -> dict[str, Mix]:
    """The declared mix, the general one, and the candidates by what they are."""
    spec = ctx.spec.imatrix
    found = {TASK: dict(spec.task), GENERAL: dict(spec.general)}
    for mix in spec.candidates:
        if dict(mix) not in found.values():
            found[describe_mix(mix)] = dict(mix)
    return found


def mix_sentence(
    mixes: Mapping[str, Mix], best: str, target: str, ratios: Mapping[str, Mapping[str, Any]]
) -> str:
    """What was chosen and on what grounds."""
    tried = f"of {len(mixes)} imatrix mixes measured with upstream's layout"
    if best == TASK:
        return (
            f"{tried}, none was shown to be better on {target} than the declared"
            f" {describe_mix(mixes[best])} within the prices"
        )
    ratio = ratios[best]
    return (
        f"{tried}, {describe_mix(mixes[best])} was better on {target}: ×{ratio['value']:.3f}"
        f" [{ratio['low']:.3f}, {ratio['high']:.3f}] of the KLD with"
        f" {describe_mix(mixes[ratio['over']])}"
    )
