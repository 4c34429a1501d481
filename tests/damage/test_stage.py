"""The damage stage of a whole run, as a race."""

import json
from pathlib import Path

from bitwright.damage.damage_map import load_damage_map
from tests.tiny import tiny_gguf
from tests.workflows.support import bitwright, write_workflow


def test_a_run_that_races(tmp_path: Path) -> None:
    model = tiny_gguf(tmp_path / "tiny-F16.gguf", n_layer=1)
    workflow = write_workflow(tmp_path)
    text = workflow.read_text(encoding="utf-8").replace("probe = 1", "probe = 3")
    text += '\n[damage]\nmode = "race"\ntolerance = 0.001\nrow_stride = 2\n'
    workflow.write_text(text, encoding="utf-8")
    folder = tmp_path / "run"
    arguments = ("run", workflow, "--model", model, "--out", folder, "--json", "--quiet")
    ran = bitwright(*arguments)
    assert ran.code == 0, ran.err
    stage = json.loads((folder / "damage.json").read_text(encoding="utf-8"))["result"]
    assert stage["race"]["rounds"] >= 1
    assert stage["curve"]["n_pairs"] >= 4
    assert "BF16 instead of F16" in stage["floors_nats"]
    found = load_damage_map(folder / "damage")
    assert any("racing used" in note for note in found.notes)
    assert (folder / "damage" / "damage_map.csv").is_file()
    again = bitwright(*arguments)
    assert again.code == 0
    assert again.json == ran.json
