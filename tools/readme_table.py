"""Print the README's result table from a run folder: python tools/readme_table.py runs/demo."""

import json
import sys
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    """Markdown rows of the target, one per file, and a line for the price elsewhere."""
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    target = result["target"]
    print(f"| file | bytes | {target} KLD, nats | against stock, same imatrix | top-1 |")
    print("|---|---|---|---|---|")
    for entry in result["files"]:
        scores = entry["scores"][target]
        cells = (
            f"**{entry['label']}**" if entry["label"] == result["chosen"] else entry["label"],
            f"{entry['size_bytes']:,}",
            f"{scores['kld_nats']:.4f} ± {scores['se']:.4f}",
            ratio_text(scores.get("ratio")),
            f"{scores['top1']:.1%}",
        )
        print("| " + " | ".join(cells) + " |")
    print()
    prices = [f"{c} {ratio_text(r)}" for c, r in result["off_target_kld_ratio"].items()]
    print(f"Elsewhere, ours against {result['baseline']}: " + "; ".join(prices) + ".")


def ratio_text(ratio: dict[str, Any] | None) -> str:
    """``×0.41 [0.39, 0.42]``; the baseline has none."""
    if ratio is None or ratio["value"] is None:
        return "1"
    return f"×{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
