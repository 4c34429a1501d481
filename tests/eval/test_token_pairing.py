"""Paired differences of per-token scores, on tables whose truth is known."""

from dataclasses import replace

import numpy as np
import pytest

from bitwright.eval.pair_files import document_rows, token_columns
from bitwright.eval.pairing import smallest_visible
from bitwright.eval.suite import load_suite
from bitwright.eval.token_pairing import compare_tokens, reference_gap
from bitwright.report.blocks import html_page
from bitwright.report.differences import difference_page
from tests.eval.synthetic import draw_pair, table

SUITE = load_suite("divergence")


def compared(a, b):
    return compare_tokens({"code": a}, {"code": b}, SUITE)


def test_differences_are_means_over_the_same_tokens():
    b, a = draw_pair(np.random.default_rng(0), 40, "lognormal", ratio=0.7)
    found = compared(a, b)
    assert list(found) == ["code/kld", "code/nll", "code/top1"]
    kld = found["code/kld"]
    assert kld.difference == pytest.approx(float(b.kld.mean() - a.kld.mean()))
    assert kld.low < kld.difference < kld.high < 0
    assert kld.verdict == "better"
    assert kld.details["ratio"]["value"] == pytest.approx(float(b.kld.mean() / a.kld.mean()))
    assert kld.details["n_documents"] == 40
    assert kld.n == a.n_tokens
    for d in found.values():
        assert d.p_holm >= d.p


def test_no_difference_is_said_to_be_none():
    a, _ = draw_pair(np.random.default_rng(1), 12, "lognormal")
    for d in compared(a, a).values():
        assert (d.difference, d.p, d.verdict) == (0.0, 1.0, "no difference shown")
    top1 = compared(a, a)["code/top1"]
    assert (top1.low, top1.high) == (-0.25, 0.25)
    assert top1.smallest_visible > 0.1


def test_tokens_of_one_document_are_no_evidence_of_each_other():
    """All flips in 2 of 30 documents: McNemar over tokens is sure, over documents it is not."""
    document = np.repeat(np.arange(30), 40)
    before = np.ones(1200, bool)
    after = before & (document >= 2)
    a = table(np.full(1200, 0.1), document, top1=before)
    b = replace(a, same_top1=after)
    top1 = compared(a, b)["code/top1"]
    assert top1.details["gained"] == 0
    assert top1.details["lost"] == 80
    assert top1.details["p_mcnemar"] < 1e-10
    assert top1.p > 0.4
    assert top1.verdict == "no difference shown"


def test_the_5_percent_test_is_one():
    """Documents whose differences are of no direction are called different in about 5 %."""
    wrong = 0
    for i in range(60):
        rng = np.random.default_rng(100 + i)
        document = np.repeat(np.arange(25), rng.integers(10, 40, 25))
        base = rng.gamma(1.0, 0.05, len(document))
        shift = rng.normal(0, 0.01, 25)[document]
        a = table(base + 0.2, document)
        b = table(base + 0.2 + shift, document)
        wrong += compared(a, b)["code/kld"].p < 0.05
    assert wrong <= 8


def test_smallest_visible_is_found_4_times_in_5_over_documents():
    rng = np.random.default_rng(3)
    counts = rng.integers(20, 60, 60).astype(float)
    size = smallest_visible(rng.normal(0, 1, 60) * counts, counts)
    found = 0
    for _ in range(300):
        sums = (rng.normal(0, 1, 60) + size) * counts
        mean = sums.sum() / counts.sum()
        residual = sums - mean * counts
        se = np.sqrt(60 / 59 * residual @ residual) / counts.sum()
        found += mean / se > 1.96
    assert 0.68 < found / 300 < 0.92


def test_one_document_says_nothing_of_the_next():
    a = table(np.full(50, 0.1), np.zeros(50, int))
    b = replace(a, kld=np.full(50, 0.2))
    kld = compared(a, b)["code/kld"]
    assert kld.difference == pytest.approx(0.1)
    assert (kld.low, kld.high, kld.smallest_visible) == (None, None, None)
    assert kld.verdict == "no difference shown"


def test_only_the_spans_that_count_are_compared_and_empty_ones_have_no_difference():
    prompt_only = table(np.ones(6), np.repeat([0, 1], 3), category="code", kind=1)
    assert compared(prompt_only, prompt_only) == {}
    mixed = table(np.arange(6.0), np.repeat([0, 1], 3), kind=np.array([1, 2, 2, 1, 2, 2]))
    assert compared(mixed, mixed)["code/kld"].n == 4


def test_tool_calls_stand_by_themselves_and_change_no_verdict():
    kinds = np.tile([1, 3, 4, 4], 20)  # prompt, assistant, call, call
    a = table(np.full(80, 0.1), np.repeat(np.arange(20), 4), category="tool_calling", kind=kinds)
    b = replace(a, kld=np.where(kinds == 4, 0.3, 0.1), same_top1=kinds != 4)
    found = compare_tokens({"tool_calling": a}, {"tool_calling": b}, SUITE)
    spans = found["tool_calling/kld"].details["spans"]
    assert spans["calls"]["difference"] == pytest.approx(0.2)
    assert (spans["calls"]["n"], spans["calls"]["top1_lost"]) == (40, 40)
    assert spans["answers"]["difference"] == pytest.approx(0.0)
    assert found["tool_calling/kld"].difference == pytest.approx(0.4 / 3)
    assert len(found) == 3
    page = html_page(difference_page("x", "y", found, "tool_calling", ()))
    assert "On other spans" in page


def test_references_apart_are_measured_and_no_obstacle():
    a, b = draw_pair(np.random.default_rng(5), 10, "lognormal")
    moved = replace(b, nll_ref=b.nll_ref + 1e-3)
    assert reference_gap({"code": a}, {"code": b}) == 0.0
    assert reference_gap({"code": a}, {"code": moved}) == pytest.approx(1e-3)
    assert compared(a, moved)["code/kld"] == compared(a, b)["code/kld"]


def test_the_rows_of_a_comparison_add_up_to_its_numbers():
    a, b = draw_pair(np.random.default_rng(6), 9, "lognormal")
    found = compared(a, b)
    rows = document_rows({"code": a}, {"code": b}, SUITE)
    n = sum(row["n_tokens"] for row in rows)
    delta = sum((row["kld_b"] - row["kld_a"]) * row["n_tokens"] for row in rows)
    assert n == a.n_tokens
    assert delta / n == pytest.approx(found["code/kld"].difference)
    ids = np.arange(a.n_tokens, dtype=np.int32)
    tokens = token_columns(a, b, ids).to_pylist()
    assert tokens[3]["token"] == 3
    assert tokens[0]["document"] == "d0"
    mean = np.mean([row["kld_b"] - row["kld_a"] for row in tokens])
    assert mean == pytest.approx(found["code/kld"].difference)
    assert token_columns(a, b, ids[1:])["token"].null_count == a.n_tokens
