"""Pages of sweeps and of builds: complete, escaped, and the same facts in every form."""

from typing import Any

import pytest

from bitwright.report.blocks import Page, Sentences, Table, html_page, markdown_page, terminal_text
from bitwright.report.curves import Mark, curves
from bitwright.report.sweep_page import sweep_page, target_text
from bitwright.report.variants_page import (
    build_sentence,
    difference_words,
    group_cell,
    ratio_words,
    variants_page,
)


def size(label: str, bpw: float, value: float, kld: float, state: str) -> dict[str, Any]:
    scores = {
        "kld_nats": kld,
        "metric": "exact_call",
        "value": value,
        "reference": 0.8,
        "state": state,
        "against_reference": {"value": 0.8 - value, "low": 0.7 - value, "high": 0.9 - value},
        "tasks": {"calls": {"metric": "exact_call", "value": value, "se": 0.03, "n": 99}},
        "spans": {"calls": {"kld_nats": 2 * kld}},
        "new_failures": {"wrong_value": 7} if state == "harmed" else {},
    }
    return {"label": label, "bpw": bpw, "size_bytes": 2_000_000, "scores": {"tool_calling": scores}}


ORIGINAL = {
    "label": "original F16",
    "bpw": 16.0,
    "size_bytes": 9_000_000,
    "scores": {
        "tool_calling": {
            "metric": "exact_call",
            "value": 0.8,
            "tasks": {"calls": {"metric": "exact_call", "value": 0.8, "se": 0.03, "n": 99}},
        }
    },
}
BREAK = {
    "last_unharmed_bpw": 8.5,
    "last_unharmed_bytes": 4_000_000,
    "first_harmed_bpw": 1.7,
    "first_harmed_bytes": 2_000_000,
    "n_items": 99,
    "more_items": 40,
    "executed": True,
    "metric": "exact_call",
    "by_family": {
        "stock": {"last_unharmed_bpw": 8.5, "first_harmed_bpw": None},
        "ours": {"last_unharmed_bpw": None, "first_harmed_bpw": 1.7},
    },
    "cliff": {"found": True, "bpw": 2.5, "low": 2.3, "high": 2.8, "reason": "cliff found"},
}
COMMON = {
    "model": "<b>model</b>",
    "workflow": "w",
    "synthetic_reference": False,
    "max_loss": 0.1,
    "target": "tool_calling",
    "reference": ORIGINAL,
}
SWEEP = {
    **COMMON,
    "kind": "sweep",
    "sizes": [
        size("stock-Q8_0", 8.5, 0.8, 1e-5, "unharmed"),
        size("uniform-IQ1_S", 1.7, 0.2, 0.9, "harmed"),
    ],
    "thresholds": {"tool_calling": BREAK},
    "first_to_break": {
        "category": None,
        "leader": "tool_calling",
        "probability": 0.9,
        "probabilities": {"tool_calling": 0.9, "chat": 0.1},
    },
    "first_failure": {
        "category": "tool_calling",
        "label": "uniform-IQ1_S",
        "kind": "wrong_value",
        "kinds": {"wrong_value": 7},
    },
    "explained_by": {
        "category": "tool_calling",
        "label": "uniform-IQ1_S",
        "groups": [{"group": "ffn_down", "share": 0.6}],
    },
}


def test_a_sweeps_text_holds_verdict_thresholds_scores_failures_and_weights() -> None:
    text = terminal_text(sweep_page(SWEEP))
    assert text.splitlines()[0].startswith(
        "tool_calling breaks between 8.50 bpw (4.000 MB) and 1.70 bpw (2.000 MB)."
    )
    assert "undecided (tool_calling in 90% of the resamples)" in text
    assert "about 40 more items" in text
    assert "cliff at 2.50 bpw [2.30, 2.80]" in text
    assert "original F16" in text
    assert "0.200 ✗ (0.9)" in text
    assert "0.800 ✓ (1e-05)" in text
    assert "0.200 ± 0.030" in text
    assert "wrong value 7" in text
    assert "ffn_down 60%" in text
    stock = next(line for line in text.splitlines() if "stock files" in line)
    assert "8.50 bpw" in stock
    assert "not established" in stock
    assert "<svg" not in text


def test_the_html_page_has_plots_and_escapes_what_comes_from_outside() -> None:
    page = html_page(sweep_page(SWEEP))
    assert "<b>model</b>" not in page
    assert "&lt;b&gt;model" in page
    assert page.count("<svg") == 2
    assert "75.0% of the score lost" in page
    assert "0.200 ✗ (0.9)" in page
    assert "<script" not in page
    assert "http" not in page


def test_markdown_holds_the_same_tables() -> None:
    page = markdown_page(sweep_page(SWEEP))
    assert "<b>" not in page
    assert "| uniform-IQ1_S | 1.70 | 2,000,000 | 0.200 ✗ (0.9) |" in page


@pytest.mark.parametrize(
    ("unharmed", "harmed", "said"),
    [
        (None, None, "is not established on 99 items"),
        (3.5, None, "unharmed down to 3.50 bpw"),
        (None, 3.5, "shown harmed at 3.50 bpw"),
    ],
)
def test_what_is_not_established_is_said(
    unharmed: float | None, harmed: float | None, said: str
) -> None:
    one = {**BREAK, "last_unharmed_bpw": unharmed, "first_harmed_bpw": harmed}
    assert said in target_text({**SWEEP, "thresholds": {"tool_calling": one}})


def build(name: str, bpw: float, state: str) -> dict[str, Any]:
    one = {**size(name, bpw, 0.6 if state == "harmed" else 0.8, 0.05, state), "name": name}
    one["scores"]["tool_calling"]["against_threshold"] = "under"
    return {
        **one,
        "honest_name": "mix",
        "reason": "no type holds 90 %",
        "path": f"/secret/run/{name}.gguf",
        "layout": f"/secret/run/{name}.layout.txt",
    }


STOCK = size("stock-Q2_K", 3.4, 0.7, 0.1, "undecided")
BUILDS = {
    **COMMON,
    "kind": "variants",
    "variants": [
        build("Bedrock", 3.8, "unharmed"),
        build("Tightrope", 3.4, "undecided"),
        build("Gambit", 3.0, "harmed"),
    ],
    "nearest_stock": {"Bedrock": STOCK, "Tightrope": STOCK, "Gambit": STOCK},
    "comparisons": [
        {
            "a": "Bedrock",
            "b": "stock-Q2_K",
            "category": "tool_calling",
            "kld_ratio": {"value": 0.5, "low": 0.4, "high": 0.6},
            "score_difference": {"value": 0.1, "low": 0.02, "high": 0.18, "p": 0.01},
        }
    ],
    "thresholds_nats": {
        "tool_calling": {"kld_nats": 0.2, "how": "calibrated", "low": 0.15, "high": 0.3}
    },
    "groups": [
        {
            "group": "attn_q.0-1",
            "tensors": 2,
            "categories": {
                "tool_calling": {"lowest_safe": "Q3_K", "first_over": "IQ1_S", "undecided": []}
            },
            "steps": {"Bedrock": "Q3_K", "Tightrope": "Q3_K", "Gambit": "IQ2_S"},
        }
    ],
    "back_off": [
        {
            "kept": False,
            "raised": [],
            "not_shown_safe": ["tool_calling"],
            "predicted_nats": {"tool_calling": 0.1},
            "measured_nats": {"tool_calling": [0.3, 0.2, 0.4]},
        },
        {
            "kept": True,
            "raised": ["attn_q.0-1"],
            "not_shown_safe": [],
            "predicted_nats": {"tool_calling": 0.05},
            "measured_nats": {"tool_calling": [0.1, 0.05, 0.15]},
        },
    ],
    "tightrope": {"how": "at the knee of the curve"},
}


def test_the_builds_stand_in_one_table_beside_stock_with_their_comparisons() -> None:
    text = terminal_text(variants_page(BUILDS))
    assert text.splitlines()[0].startswith("Bedrock (2.000 MB, 3.80 bpw): shown unharmed on")
    assert "Gambit (2.000 MB, 3.00 bpw): shown harmed on tool_calling (-25%)" in text
    assert text.count("\n stock-Q2_K") + text.count("\nstock-Q2_K") == 1  # its own row
    assert "×0.500 [0.400, 0.600]" in text
    assert "+0.100 [+0.020, +0.180]" in text
    assert "0.2 [0.15, 0.3]" in text
    assert "not shown safe together; 1 of 1 were raised (2 whole layouts measured)" in text
    assert "mix (no type holds 90 %)" in text


def test_no_page_tells_where_the_run_folder_is() -> None:
    page = variants_page(BUILDS)
    for text in (html_page(page), markdown_page(page), terminal_text(page)):
        assert "/secret" not in text
        assert "Gambit.layout.txt" in text


def test_groups_are_detail_of_the_html_page() -> None:
    page = variants_page(BUILDS)
    assert "Q3_K ✓, IQ1_S ✗" in html_page(page)
    assert "attn_q.0-1" not in terminal_text(page)


def test_words_for_what_intervals_show() -> None:
    assert ratio_words({"low": 0.4, "high": 0.9}) == "closer"
    assert ratio_words({"low": 1.1, "high": 1.9}) == "farther"
    assert ratio_words({"low": 0.4, "high": 1.9}) == "no difference shown"
    assert ratio_words({"low": None, "high": None}) == ""
    assert difference_words({"low": 0.1, "high": 0.2}) == "better"
    assert difference_words({"low": -0.2, "high": -0.1}) == "worse"
    assert difference_words({"low": -0.2, "high": 0.1}) == "no difference shown"
    cell = {"lowest_safe": None, "first_over": None, "undecided": ["Q2_K"], "cliff_bpw": 2.0}
    assert group_cell(cell) == "none ✓, Q2_K ?, cliff at 2.00 bpw"
    assert "no task was scored" in build_sentence({**BUILDS["variants"][0], "scores": {}})


def test_empty_blocks_are_left_out() -> None:
    page = Page("t", "v", ("careful",), (Table("No rows", ("a",), ()), Sentences("No lines", ())))
    assert "<h2>" not in html_page(page)
    assert terminal_text(page) == "v\ncareful"


def test_many_warnings_are_cut_and_their_samples_left_to_the_result() -> None:
    flags = [f"x: task {i}: unread; samples: <...>" for i in range(11)]
    text = terminal_text(sweep_page({**SWEEP, "flags": flags}))
    assert "x: task 7: unread\n" in text
    assert "task 8" not in text
    assert "and 3 more" in text
    assert "; samples" not in text


def test_no_points_no_figure() -> None:
    assert curves({}, "y") == ""
    assert curves({"a": [Mark(3.0, 0.0, "zero")]}, "y", log=True) == ""
    assert "<polyline" in curves({"a": [Mark(3.0, 0.5, "one")]}, "y")
    assert "<path" in curves({"a": [Mark(3.0, 0.5, "one", (0.2, 0.9))]}, "y")


def test_files_are_named_and_not_joined() -> None:
    marks = [Mark(3.0, -0.1, "one"), Mark(3.01, 0.2, "two"), Mark(4.0, 0.3, "three")]
    figure = curves({"a": marks}, "y", share=True, names={"x": 3.0, "<y>": 3.01, "z": 4.0})
    assert "<polyline" not in figure
    assert "&lt;y&gt;" in figure
    assert ">30%<" in figure
    assert ">0<" in figure  # the line of no loss
    heights = [float(part.split('"')[0]) for part in figure.split(' y="')[1:]]
    assert {12.0, 26.0} <= set(heights)  # two close names stand on two lines


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(2.38, 2.84, "2.4 2.6 2.8"), (1.8, 8.6, "2 3 4 5 6 7 8"), (3.0, 3.0, "3")],
)
def test_ticks_are_round_numbers(low: float, high: float, ticks: str) -> None:
    figure = curves({"a": [Mark(low, 0.1, "one"), Mark(high, 0.2, "two")]}, "y")
    for tick in ticks.split():
        assert f">{tick}</text>" in figure
