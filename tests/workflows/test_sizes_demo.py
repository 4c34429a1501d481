"""The two built-in workflows over many sizes, as they are, on the demo model."""

from pathlib import Path

import pytest

from bitwright.engine.model_file import open_model
from tests.workflows.support import bitwright

pytestmark = pytest.mark.slow


def test_where_tool_calling_breaks(tmp_path: Path) -> None:
    out = tmp_path / "run"
    ran = bitwright("run", "tool-calling-threshold", "--model", "demo", "--out", out, "--json")
    assert ran.code == 0, ran.err
    calls = ran.json["thresholds"]["tool_calling"]
    # Known of this model (its card): no loss at 3.4 bpw, most calls lost at 1.8.
    assert 2.2 < calls["last_unharmed_bpw"] < 5.1
    assert 1.8 < calls["first_harmed_bpw"] < calls["last_unharmed_bpw"]
    first = ran.json["first_to_break"]
    assert first["category"] in ("tool_calling", None)
    assert first["probabilities"]["math"] < 0.05
    smallest = ran.json["sizes"][-1]["scores"]
    assert smallest["tool_calling"]["state"] == "harmed"
    assert sum(smallest["tool_calling"]["new_failures"].values()) > 20
    for name in ("report.html", "README.md", "result.json"):
        assert (out / name).stat().st_size > 1000
    kept = tmp_path / "kept.json"
    check = ("thresholds", out, "--out", kept, "--fail-if")
    assert bitwright(*check, "tool_calling.breaks_above=5.1bpw").code == 0
    assert bitwright(*check, "tool_calling.breaks_above=1.8bpw").code == 1


def test_three_builds(tmp_path: Path) -> None:
    out = tmp_path / "run"
    ran = bitwright("run", "bedrock-tightrope-gambit", "--model", "demo", "--out", out, "--json")
    assert ran.code == 0, ran.err
    builds = ran.json["variants"]
    sizes = [one["size_bytes"] for one in builds]
    assert sizes[0] > sizes[1] > sizes[2]
    for one in builds:
        assert (
            open_model(one["path"], allow_requantize=True).path.stat().st_size == one["size_bytes"]
        )
    assert all(entry["state"] != "harmed" for entry in builds[0]["scores"].values())
    (kept,) = [one for one in ran.json["back_off"] if one["kept"]]
    assert kept["not_shown_safe"] == []
    assert len({c["category"] for c in ran.json["comparisons"]}) == 4
    assert len(ran.json["comparisons"]) == 4 * 6
