"""`bitwright thresholds`: where several runs break, side by side, and a check for CI."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitwright.engine.atomic import write_atomic
from bitwright.errors import ConfigError, InputError
from bitwright.report.blocks import terminal_table
from bitwright.report.sweep_page import first_text, run_table, threshold_table
from bitwright.workflows.output import Output

KEPT = (
    *("model", "workflow", "reference_type", "suites", "imatrix", "versions", "seed"),
    *("max_loss", "thresholds", "first_to_break"),
)
CONDITIONS = ("breaks_above", "unproven_above")
FORM = (
    "write CATEGORY.breaks_above=3.9bpw (fails when a larger size is shown harmed) or "
    "CATEGORY.unproven_above=3.9bpw (fails unless a size of at most that is shown unharmed)"
)
_CONDITION = re.compile(
    r"(?P<category>[^.=]+)\.(?P<condition>\w+)=(?P<bpw>\d+(?:\.\d+)?)\s*(?:bpw)?"
)


@dataclass(frozen=True, slots=True)
class FailIf:
    """One condition under which the check fails."""

    text: str
    category: str
    condition: str
    bpw: float


def parse_fail_if(text: str) -> FailIf:
    """Read ``tool_calling.breaks_above=3.9bpw``.

    Raises:
        ConfigError: anything else.
    """
    found = _CONDITION.fullmatch(text.strip())
    if found is None or found["condition"] not in CONDITIONS:
        raise ConfigError(f"--fail-if {text!r} cannot be read: {FORM}")
    return FailIf(text, found["category"], found["condition"], float(found["bpw"]))


def thresholds(
    runs: Sequence[Path], fail_if: Sequence[str], out: Path | None, output: Output
) -> bool:
    """Show the runs' thresholds; whether every condition holds.

    ``out``: keep them in one file, which can be given as a run later.

    Raises:
        InputError: a run holds no thresholds.
        ConfigError: a condition that cannot be read, or names a category that no run has.
    """
    conditions = [parse_fail_if(text) for text in fail_if]
    found: dict[str, dict[str, Any]] = {}
    for path in runs:
        for name, result in load_thresholds(path).items():
            found[name if name not in found else f"{name} ({path})"] = result
    failures = [message for one in conditions for message in failures_of(one, found)]
    if out is not None:
        text = json.dumps({"kind": "thresholds", "runs": found}, indent=1, allow_nan=False)
        write_atomic(out, (text + "\n").encode())
    shown = [terminal_table(table) for table in (threshold_table(found), run_table(found))]
    shown += [f"{name}: {first_text(result)}" for name, result in found.items()]
    unproven = [message for one in conditions for message in unproven_of(one, found)]
    facts = {"runs": found, "failures": failures, "unproven": unproven, "passed": not failures}
    verdict = [] if not conditions else ["failed" if failures else "passed"]
    output.result(facts, "\n".join([*shown, *failures, *unproven, *verdict]))
    return not failures


def load_thresholds(path: Path) -> dict[str, dict[str, Any]]:
    """Name → model, thresholds and first to break: of a run folder, a result.json or a kept file.

    Raises:
        InputError: none of these.
    """
    file = path / "result.json" if path.is_dir() else path
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(
            f"{path} is no run folder with a result.json, and no file of thresholds: give the "
            "folder of a sweep that ended (bitwright run tool-calling-threshold)"
        ) from None
    if isinstance(loaded, dict) and loaded.get("kind") == "thresholds":
        kept = loaded.get("runs")
        if isinstance(kept, dict) and all(map(_is_sweep, kept.values())):
            return dict(kept)
    if not _is_sweep(loaded):
        raise InputError(
            f"{file} holds no thresholds: give the folder of a sweep that ended (bitwright run "
            "tool-calling-threshold)"
        )
    name = path.name if path.is_dir() else str(loaded.get("model", path.stem))
    kept = {k: loaded.get(k) for k in KEPT}
    return {name: kept}


def _is_sweep(loaded: object) -> bool:
    if not (isinstance(loaded, dict) and isinstance(loaded.get("thresholds"), dict)):
        return False
    needed = {"last_unharmed_bpw", "first_harmed_bpw", "n_items"}
    ok = all(
        isinstance(one, dict) and needed <= one.keys() for one in loaded["thresholds"].values()
    )
    return ok and isinstance(loaded.get("first_to_break"), dict)


def unproven_of(condition: FailIf, runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence for each run that passes ``breaks_above`` only for want of items."""
    messages = []
    for name, result in runs.items():
        one = result["thresholds"][condition.category]
        harmed, unharmed = one["first_harmed_bpw"], one["last_unharmed_bpw"]
        broken = harmed is not None and harmed > condition.bpw
        proven = unharmed is not None and unharmed <= condition.bpw
        if condition.condition == "breaks_above" and not broken and not proven:
            more = one.get("more_items")
            items = f"; about {more:,} more items would narrow it" if more else ""
            messages.append(
                f"{name}: {condition.category} is not shown harmed above {condition.bpw:g} bpw, "
                f"and not shown unharmed there either{items}"
            )
    return messages


def failures_of(condition: FailIf, runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence for each run in which the condition is met.

    Raises:
        ConfigError: a run does not have the category.
    """
    messages = []
    for name, result in runs.items():
        one = result["thresholds"].get(condition.category)
        if one is None:
            raise ConfigError(
                f"--fail-if {condition.text}: {name} has no category {condition.category!r}, but "
                f"{', '.join(result['thresholds'])}"
            )
        harmed, unharmed = one["first_harmed_bpw"], one["last_unharmed_bpw"]
        if condition.condition == "breaks_above" and harmed is not None and harmed > condition.bpw:
            messages.append(
                f"{name}: {condition.category} is shown harmed at {harmed:.2f} bpw, above "
                f"{condition.bpw:g} bpw"
            )
        proven = unharmed is not None and unharmed <= condition.bpw
        if condition.condition == "unproven_above" and not proven:
            shown = "at no size" if unharmed is None else f"only down to {unharmed:.2f} bpw"
            messages.append(
                f"{name}: {condition.category} is shown unharmed {shown}, not at "
                f"{condition.bpw:g} bpw or less"
            )
    return messages
