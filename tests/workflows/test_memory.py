"""A context whose logits do not fit in memory is refused at the start of a run."""

from pathlib import Path
from unittest.mock import patch

from tests.workflows.support import bitwright


def test_a_run_says_what_context_would_fit(tmp_path: Path, tiny_model: Path, workflow: Path):
    with patch("bitwright.workflows.preflight.available_memory", lambda: 200_000):
        ran = bitwright("run", workflow, "--model", tiny_model, "--out", tmp_path / "run")
    assert ran.code == 1
    assert "128 scored tokens × 288 logits" in ran.err
    assert "of at most 86 tokens" in ran.err
    assert not (tmp_path / "run" / "corpus.json").exists()
