"""`bitwright compare`: two results or more on the same items or tokens, the first as baseline."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitwright.engine.atomic import write_atomic
from bitwright.errors import ConfigError, InputError
from bitwright.eval.outcome import TaskResult, load_results
from bitwright.eval.pair_files import (
    Rows,
    document_rows,
    item_rows,
    save_comparison,
    token_columns,
)
from bitwright.eval.pairing import Difference, by_category, compare_results
from bitwright.eval.suite import load_suite
from bitwright.eval.token_pairing import compare_tokens, reference_gap
from bitwright.report.blocks import Page, html_page, terminal_text
from bitwright.report.differences import difference_page
from bitwright.workflows.output import Output
from bitwright.workflows.run_folder import RunFolder
from bitwright.workflows.run_scores import (
    RunRecord,
    RunScores,
    load_scores,
    read_record,
    scores_stage,
)

ENGINE = ("llama-cpp-python", "n_ctx", "gpu_layers", "working_type", "flash_attn")
KINDS = {
    "suite": "a suite's items (`bitwright evaluate --suite --out`)",
    "run": "per-token scores (`bitwright run`, or `evaluate --corpus --out`)",
}


@dataclass(frozen=True, slots=True)
class Named:
    """One argument: a folder, and the file in it where one was named (FOLDER:LABEL)."""

    folder: Path
    label: str | None
    kinds: frozenset[str]


@dataclass(frozen=True, slots=True)
class Compared:
    """One pair: the differences, notes for a reader, and the rows behind them."""

    a: str
    b: str
    target: str | None
    found: Mapping[str, Difference]
    notes: tuple[str, ...]
    rows: Rows
    tokens: Sequence[Any] = ()

    def shown(self) -> Page:
        """The pair as a page for a person."""
        return difference_page(self.a, self.b, self.found, self.target, self.notes)

    def page(self) -> dict[str, object]:
        """The JSON of the pair; target tasks and the others by name where a target is known."""
        sides = by_category(self.found, self.target) if self.target else {}
        return {
            "a": self.a,
            "b": self.b,
            "tasks": {name: d.as_dict() for name, d in self.found.items()},
            **({"target": self.target, **sides} if self.target else {}),
            "notes": list(self.notes),
        }


def compare(
    results: Sequence[str], output: Output, *, target: str | None = None, out: Path | None = None
) -> None:
    """Each result against the first one, paired; of a single run, its choice and its baseline.

    Raises:
        ConfigError: too few results. InputError: results that cannot be paired.
    """
    named = [parse(text) for text in results]
    kind = _kind(named)
    if kind == "run":
        pairs = _compare_runs(_with_baseline(named), target)
    else:
        _need_two(named)
        _refuse_same([(one.folder, None) for one in named])
        pairs = _compare_suites(named, target)
    if target is not None and not any(
        d.category == target for p in pairs for d in p.found.values()
    ):
        known = sorted({d.category for pair in pairs for d in pair.found.values()})
        raise ConfigError(f"--target {target} was not scored: give one of {', '.join(known)}")
    pages = [pair.page() for pair in pairs]
    if out is not None:
        for pair, page in zip(pairs, pages, strict=True):
            name = f"{pair.b}-against-{pair.a}".replace("/", "_").replace(":", "_")
            folder = RunFolder.open(out if len(pairs) == 1 else out / name)
            save_comparison(folder.path, page, pair.rows, pair.tokens)
            write_atomic(folder.path / "comparison.html", html_page(pair.shown()).encode())
    data = pages[0] if len(pages) == 1 else {"comparisons": pages}
    output.result(data, "\n\n".join(_text(pair.shown()) for pair in pairs))


def _text(page: Page) -> str:
    return f"{page.title}\n{terminal_text(page)}"


def parse(text: str) -> Named:
    """FOLDER or FOLDER:LABEL.

    Raises:
        InputError: there is nothing in the folder that can be compared.
    """
    folder, label = Path(text), None
    if not folder.exists() and ":" in text:
        before, _, label = text.rpartition(":")
        folder = Path(before)
    kinds = set()
    if (folder / "results.json").is_file() and label is None:
        kinds.add("suite")
    if scores_stage(folder):
        kinds.add("run")
    if not kinds:
        raise InputError(f"{folder} {_what_is_there(folder)}")
    return Named(folder, label, frozenset(kinds))


def _what_is_there(folder: Path) -> str:
    if not folder.exists():
        return "does not exist: give the folder of a run or of `bitwright evaluate --out`"
    items = sorted({str(p.parent) for p in folder.glob("*/items/*/results.json")})
    items += sorted(str(p.parent) for p in folder.glob("seed/*/results.json"))
    if items:
        return f"holds results of several files: give two of {', '.join(items)}"
    ended = (folder / "result.json").is_file()
    has = "holds a run without per-token scores" if ended else "holds nothing to compare"
    return f"{has}: give folders with {KINDS['suite']} or with {KINDS['run']}"


def _kind(named: Sequence[Named]) -> str:
    common = frozenset.intersection(*(one.kinds for one in named)) if named else frozenset()
    if named and not common:
        first = named[0]
        other = next(one for one in named if not one.kinds & first.kinds)
        raise InputError(
            f"{first.folder} holds {KINDS[min(first.kinds)]} and {other.folder} "
            f"{KINDS[min(other.kinds)]}: give two of one kind"
        )
    return "suite" if "suite" in common or not named else "run"


def _need_two(named: Sequence[Named]) -> None:
    if len(named) < 2:
        raise ConfigError("compare needs two result folders or more; the first is the baseline")


def _with_baseline(named: Sequence[Named]) -> list[tuple[RunRecord, str | None]]:
    records = {one.folder: read_record(one.folder) for one in named}
    chosen = [(records[one.folder], one.label) for one in named]
    if len(chosen) == 1:
        record, label = chosen[0]
        if record.baseline is None or (label or record.chosen) == record.baseline:
            raise ConfigError(
                f"{record.folder.path} has nothing else to compare with: give two runs, or "
                f"FOLDER:LABEL twice with two of {', '.join(record.labels)}"
            )
        chosen.insert(0, (record, record.baseline))
    meant = [(record.folder.path, label or record.chosen) for record, label in chosen]
    if meant[0][1] is not None:  # else load_scores asks for a file by name
        _refuse_same(meant)
    return chosen


def _refuse_same(named: Sequence[tuple[Path, str | None]]) -> None:
    """Raise ConfigError where the first is compared with itself."""
    first, *others = [(folder.resolve(), label) for folder, label in named]
    if first in others:
        shown = named[0][0] if first[1] is None else f"{named[0][0]}:{first[1]}"
        raise ConfigError(f"{shown} would be compared with itself: give two different results")


def _compare_suites(named: Sequence[Named], target: str | None) -> list[Compared]:
    loaded = [load_results(one.folder) for one in named]
    first = loaded[0]
    pairs = []
    for i, other in enumerate(loaded[1:], start=1):
        notes = _version_notes(first[1], other[1])
        found = compare_results(first[0], other[0])
        pairs.append(
            Compared(
                str(first[1].get("model", named[0].folder.name)),
                str(other[1].get("model", named[i].folder.name)),
                target or other[1].get("target") or first[1].get("target"),
                found,
                (*notes, *_left_out(first[0], other[0], found)),
                item_rows(first[0], other[0]),
            )
        )
    return pairs


def _version_notes(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, ...]:
    """Another engine behind two results is said; another meaning of the numbers is refused."""
    if a.get("metrics_version") != b.get("metrics_version"):
        raise InputError(
            f"the results have metrics version {a.get('metrics_version')} and "
            f"{b.get('metrics_version')}: evaluate both with one version of bitwright"
        )
    name = "llama-cpp-python"
    before, after = (found.get("versions", {}).get(name) for found in (a, b))
    if before and after and before != after:
        return (f"scored with other engines: {name} {before} and {after}",)
    return ()


def _left_out(
    a: Sequence[TaskResult], b: Sequence[TaskResult], found: Mapping[str, Difference]
) -> tuple[str, ...]:
    names = dict.fromkeys([*(r.name for r in a), *(r.name for r in b)])
    missing = [name for name in names if name not in found]
    return (f"not compared, not scored in both: {', '.join(missing)}",) if missing else ()


def _compare_runs(
    chosen: Sequence[tuple[RunRecord, str | None]], target: str | None
) -> list[Compared]:
    first, *others = [load_scores(record, label) for record, label in chosen]
    return [_compare_two(first, other, target) for other in others]


def _compare_two(a: RunScores, b: RunScores, target: str | None) -> Compared:
    common = _same_text(a, b)
    suite = load_suite("divergence")
    left, right = ({c: one.tables[c] for c in common} for one in (a, b))
    notes = list(_reference_notes(a, b, reference_gap(left, right)))
    if alone := [c for c in (*a.chunks, *b.chunks) if c not in common]:
        notes.append(f"not compared, scored in one run only: {', '.join(dict.fromkeys(alone))}")
    if a.target and b.target and a.target != b.target and target is None:
        notes.append(f"the targets differ: {a.target} and {b.target}; the first one is shown")
    tokens = [token_columns(left[c], right[c], a.ids.get(c)) for c in common]
    return Compared(
        a.name,
        b.name,
        target or a.target or b.target,
        compare_tokens(left, right, suite),
        tuple(notes),
        document_rows(left, right, suite),
        tokens,
    )


def _same_text(a: RunScores, b: RunScores) -> list[str]:
    """The categories of both.

    Raises:
        InputError: another reference model, other text, or no category in common.
    """
    if a.model != b.model:
        raise InputError(
            f"{a.name} and {b.name} were scored against other reference models (sha256 "
            f"{a.model[:12] or 'unknown'} and {b.model[:12] or 'unknown'}), so their KLD is not of "
            "one thing: run both with the same --model"
        )
    common = [category for category in a.chunks if category in b.chunks]
    if not common:
        raise InputError(
            f"{a.name} and {b.name} have no category in common ({', '.join(a.chunks)} and "
            f"{', '.join(b.chunks)}): run both on the same corpora"
        )
    for category in common:
        if a.chunks[category] != b.chunks[category]:
            raise InputError(
                f"{a.name} and {b.name} were scored on other {category} text (chunks "
                f"{a.chunks[category][:12]} and {b.chunks[category][:12]}): run both with the same "
                "recipes, seed, context and number of report chunks"
            )
    return common


def _reference_notes(a: RunScores, b: RunScores, gap_nats: float) -> list[str]:
    differ = [
        f"{name} {json.dumps(a.engine[name])} and {json.dumps(b.engine[name])}"
        for name in ENGINE
        if name in a.engine and name in b.engine and a.engine[name] != b.engine[name]
    ]
    notes = []
    if differ:
        notes.append(f"the references were computed with other settings: {', '.join(differ)}")
    if gap_nats > 0.0:
        notes.append(
            f"the two references are {gap_nats:.2g} nats per token apart (another machine or other "
            "settings): differences of that size mean nothing"
        )
    return notes
