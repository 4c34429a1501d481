"""The page of a sweep: escaped, complete, and asking for nothing."""

from bitwright.report.curves import Mark, curves
from bitwright.report.sizes_html import sizes_html


def size(label: str, bpw: float, value: float, kld: float, state: str) -> dict[str, object]:
    scores = {
        "kld_nats": kld,
        "value": value,
        "reference": 0.8,
        "state": state,
        "against_reference": {"value": 0.8 - value},
    }
    return {"label": label, "bpw": bpw, "size_bytes": 1000, "scores": {"tool_calling": scores}}


RESULT = {
    "model": "<b>model</b>",
    "workflow": "w",
    "synthetic_reference": False,
    "sizes": [
        size("stock-Q8_0", 8.5, 0.8, 1e-5, "unharmed"),
        size("uniform-IQ1_S", 1.7, 0.2, 0.9, "harmed"),
    ],
}


def test_the_page_has_plot_and_table_and_escapes_what_comes_from_outside() -> None:
    page = sizes_html(RESULT, "breaks & falls", ["a <fact>"])
    assert "<b>model</b>" not in page
    assert "breaks &amp; falls" in page
    assert "a &lt;fact&gt;" in page
    assert page.count("<svg") == 2
    assert "0.200 ✗ (0.9)" in page
    assert "75.0% of the score lost" in page
    assert "<script" not in page
    assert "http" not in page


def test_builds_and_their_stock_files_are_listed_once() -> None:
    one = size("stock-Q2_K", 3.4, 0.7, 0.1, "undecided")
    build = {**size("x", 3.3, 0.75, 0.05, "unharmed"), "name": "Bedrock"}
    result = {**RESULT, "variants": [build], "nearest_stock": {"Bedrock": one, "Gambit": one}}
    del result["sizes"]
    page = sizes_html(result, "v", [])
    assert page.count("<td>stock-Q2_K</td>") == 1
    assert "<td>Bedrock</td>" in page


def test_no_points_no_figure() -> None:
    assert curves({}, "y") == ""
    assert curves({"a": [Mark(3.0, 0.0, "zero")]}, "y", log=True) == ""
    assert "<polyline" in curves({"a": [Mark(3.0, 0.5, "one")]}, "y")
