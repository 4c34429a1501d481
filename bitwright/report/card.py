"""The model card that lies beside a produced GGUF: what it is, how good, how to make it again."""

import json
import re
from collections.abc import Mapping
from typing import Any

from bitwright.report.extras import ReportExtras
from bitwright.report.figures import shares_by_type
from bitwright.report.wording import (
    categories_of,
    compared_name,
    file_name,
    file_of,
    flat_items,
    kld_text,
    model_name,
    ratio_text,
    ratio_verdict,
    share_text,
    size_text,
    verdict_sentence,
    warnings_of,
)


def model_card(result: Mapping[str, Any], extras: ReportExtras) -> str:
    """README.md for the chosen file. Holds base names only, never a path of this machine."""
    chosen = file_of(result, result["chosen"])
    parts = (
        _front_matter(extras),
        _opening(result, extras, chosen),
        _table(result),
        _price(result),
        _layout(result, extras, chosen),
        _limits(result, extras),
        _again(result, extras),
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(extras: ReportExtras) -> str:
    fields = {"base_model": extras.base_model, "license": extras.license}
    # JSON strings are YAML strings, whatever they hold.
    lines = [f"{key}: {json.dumps(value)}" for key, value in fields.items() if value]
    return "\n".join(["---", *lines, "library_name: gguf", "tags: [gguf, bitwright]", "---"])


def _opening(result: Mapping[str, Any], extras: ReportExtras, chosen: Mapping[str, Any]) -> str:
    name = file_name(chosen) or chosen["label"]
    base = extras.base_model or model_name(result)
    size = f"{chosen['size_bytes']:,} bytes ({size_text(chosen['size_bytes'])})"
    honest = extras.names.get(chosen["label"], "")
    lines = [
        f"# {markdown(name)}",
        f"{markdown(base)} quantized for **{markdown(result['target'])}** with Bitwright: {size}"
        + (f", {markdown(honest)}." if honest else "."),
        markdown(verdict_sentence(result)),
    ]
    lines += [f"> {markdown(warning)}" for warning in warnings_of(result)]
    lines.append("It runs wherever llama.cpp runs: the file holds standard tensor types only.")
    return "\n\n".join(lines)


def _table(result: Mapping[str, Any]) -> str:
    target = result["target"]
    rows = [
        [
            "file",
            "bytes",
            f"{target} KLD",
            "top-1",
            *(f"{c} KLD" for c in categories_of(result)[1:]),
        ]
    ]
    for entry in result["files"]:
        score = entry["scores"].get(target, {})
        others = [entry["scores"].get(c, {}) for c in categories_of(result)[1:]]
        label = markdown(entry["label"])
        rows.append(
            [
                f"**{label}**" if entry["label"] == result["chosen"] else label,
                f"{entry['size_bytes']:,}",
                kld_text(score.get("kld_nats"), score.get("se")),
                share_text(score.get("top1")),
                *(kld_text(s.get("kld_nats"), s.get("se")) for s in others),
            ]
        )
    return (
        "## Scores\n\n"
        + _rows(rows)
        + "\n\nKLD in nats per token from the reference (mean ± standard error over documents) and "
        "agreement of the most likely token, on text used for nothing else."
    )


def _price(result: Mapping[str, Any]) -> str:
    ratios = {result["target"]: result["target_kld_ratio"], **result["off_target_kld_ratio"]}
    compared = f"KLD of {compared_name(result)} over that of {result['baseline']}"
    rows = [["category", compared, ""]]
    rows += [[markdown(c), ratio_text(r), ratio_verdict(r)] for c, r in ratios.items()]
    return "## Against the baseline, paired\n\n" + _rows(rows)


def _layout(result: Mapping[str, Any], extras: ReportExtras, chosen: Mapping[str, Any]) -> str:
    layout = extras.layouts.get(chosen["label"])
    if layout is None or extras.tensors is None:
        return ""
    rows = [["type", "tensors", "share of the quantized weights"]]
    shares = shares_by_type(layout, extras.tensors)
    rows += [[t, str(n), f"{100 * share:.1f} %"] for t, n, share in shares]
    return "## Layout\n\n" + _rows(rows)


def _limits(result: Mapping[str, Any], extras: ReportExtras) -> str:
    lines = [
        "KLD tells how far the answers' probabilities moved, not whether an answer is right.",
        "The scores hold for text like the corpora that were used, "
        f"and the layout was chosen for {result['target']}.",
        *extras.notes,
    ]
    return "## What to keep in mind\n\n" + "\n".join(f"- {markdown(line)}" for line in lines)


def _again(result: Mapping[str, Any], extras: ReportExtras) -> str:
    items = [f"- {markdown(k)}: `{v.replace('`', '')}`" for k, v in flat_items(extras.recipe)]
    command = f"```\n{extras.command.replace('```', '')}\n```\n\n" if extras.command else ""
    if not items and not command:
        return ""
    same = "The same inputs, versions and seed give the same file, bit for bit."
    return f"## How to make it again\n\n{command}{same}\n\n" + "\n".join(items)


def markdown(text: str) -> str:
    """Text from outside, with what Markdown or HTML would act on made harmless."""
    flat = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # An underscore inside a word (Q3_K) marks nothing up and stays readable.
    return re.sub(r"([\\`*\[\]|#]|(?<!\w)_|_(?!\w))", r"\\\1", flat)


def _rows(rows: list[list[str]]) -> str:
    head, *body = rows
    rule = ["---", *["---:"] * (len(head) - 1)]
    head = [markdown(cell) for cell in head]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *body])
