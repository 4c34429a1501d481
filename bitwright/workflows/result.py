"""result.json: what others rely on. Keys are a contract; new ones may be added, none changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitwright.engine.model_file import ModelFile
from bitwright.eval.divergence import ScoreTable
from bitwright.eval.scores import Comparison, scores_of
from bitwright.eval.suite import DivergenceSuite

RESULT_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One row of the result: a layout and an imatrix, written (path) or only scored."""

    label: str
    layout: str  # 'ours', 'role-rule' or a stock type
    imatrix: str
    size_bytes: int
    types: Mapping[str, str]
    path: str | None = None


def build_result(
    model: ModelFile,
    model_spec: str,
    target: str,
    budget_bytes: int,
    entries: Sequence[FileEntry],
    comparison: Comparison,
    verdict: str,
    chosen: str,
    table: ScoreTable,
    suite: DivergenceSuite,
    predicted_over_measured: float | None,
) -> dict[str, Any]:
    """The dictionary of result.json."""
    n_weights = sum(info.n_elements for info in model.tensors)
    compared = comparison.as_dict()
    files = [
        {
            "label": entry.label,
            "path": entry.path,
            "layout": entry.layout,
            "imatrix": entry.imatrix,
            "size_bytes": entry.size_bytes,
            "bpw": round(8 * entry.size_bytes / n_weights, 4),
            "scores": scores_of(table, entry.label, suite, comparison.baseline),
        }
        for entry in entries
    ]
    return {
        "schema": RESULT_SCHEMA,
        "model": model_spec,
        "reference_type": model.reference_type,
        "synthetic_reference": model.synthetic_reference,
        "target": target,
        "budget_bytes": budget_bytes,
        "chosen": chosen,
        "baseline": comparison.baseline,
        "files": files,
        "target_kld_ratio": compared["target_kld_ratio"],
        "off_target_kld_ratio": compared["off_target_kld_ratio"],
        "predicted_over_measured": predicted_over_measured,
        "verdict": verdict,
    }
