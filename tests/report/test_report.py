import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pandas as pd
import pytest

from bitwright.report.card import markdown, model_card
from bitwright.report.extras import ReportExtras
from bitwright.report.figures import damage_heat_map, layout_by_depth, shares_by_type
from bitwright.report.html import html_report
from bitwright.report.tables import results_text
from bitwright.report.wording import kld_text, size_text, verdict_sentence
from tests.report.sample import interval, make_extras, make_result

VOID = {"meta", "br"}
EVIL = "<script>alert('x')</script> & [bold]no[/bold] | `tick`"


class Balance(HTMLParser):
    """Fails on tags that are not closed in order; collects visible text and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str | None]] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "title"} & set(self.open):
            self.text += data


def parsed(page: str) -> Balance:
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    return parser


def test_the_page_is_well_formed_and_asks_for_nothing() -> None:
    page = html_report(make_result(), make_extras())
    seen = parsed(page)
    assert not seen.tags & {"script", "link", "img", "iframe", "object"}
    assert not {name for name, _ in seen.attributes} & {"src", "href", "onclick", "onload"}
    assert "url(" not in page
    assert "@import" not in page
    assert len(page) < 6_000_000


def test_the_verdict_is_the_first_thing_and_a_synthetic_reference_the_second() -> None:
    synthetic = make_result() | {"synthetic_reference": True}
    seen = parsed(html_report(synthetic, make_extras()))
    first = seen.text.strip()
    assert first.startswith("Better: on code, ours, task imatrix has 0.510 times the KLD")
    assert first.index("reference is synthetic") < first.index("Results")
    assert "synthetic" not in html_report(make_result(), make_extras())
    assert "synthetic" in results_text(synthetic)
    assert "synthetic" in model_card(synthetic, make_extras())


def test_damages_of_a_prior_are_called_not_measured_everywhere() -> None:
    result = make_result() | {"not_measured": "damages come from a prior of made"}
    for text in (
        html_report(result, make_extras()),
        model_card(result, make_extras()),
        results_text(result),
    ):
        assert "damages come from a prior of made" in text
    assert "damages come" not in html_report(make_result(), make_extras())


@pytest.mark.parametrize(
    "render",
    [
        lambda result, extras: html_report(result, extras),
        lambda result, extras: model_card(result, extras),
        lambda result, extras: results_text(result),
    ],
)
def test_every_number_of_the_target_is_on_the_page(
    render: Callable[[dict[str, Any], ReportExtras], str],
) -> None:
    result = make_result()
    text = render(result, make_extras())
    for entry in result["files"]:
        score = entry["scores"]["code"]
        assert kld_text(score["kld_nats"], score["se"]) in text
    assert "0.510" in text
    assert "no data" in text  # math of the chosen file
    assert "nan" not in text.lower().replace("finance", "")


def test_a_bare_result_is_enough() -> None:
    result = make_result()
    result["off_target_kld_ratio"] = {}
    for entry in result["files"]:
        entry["scores"] = {"code": entry["scores"]["code"]}
        entry["scores"]["code"].pop("ratio", None)
        del entry["bpw"]
    page = html_report(result, ReportExtras())
    assert "Damage map" not in page
    parsed(page)
    assert "×0.510" in results_text(result)
    assert "## Scores" in model_card(result, ReportExtras())


def test_text_from_outside_stays_text() -> None:
    result = json.loads(json.dumps(make_result()).replace("ours, task imatrix", "EVIL"))
    text = json.dumps(result).replace("EVIL", json.dumps(EVIL)[1:-1])
    result = json.loads(text)
    extras = make_extras(
        layouts={EVIL: make_extras().layouts["ours, task imatrix"]},
        notes=[EVIL], names={EVIL: EVIL}, recipe={EVIL: {EVIL: EVIL}}, command=EVIL,
        corpora={EVIL: {EVIL: {EVIL: 3}}}, base_model=EVIL, noise_nats={EVIL: 1e-9},
    )  # fmt: skip
    page = html_report(result, extras)
    assert "script" not in parsed(page).tags
    assert "<script" not in page
    card = model_card(result, extras)
    outside_code = re.sub(r"```.*?```|`[^`]*`", "", card.split("---\n", 2)[2], flags=re.DOTALL)
    assert "<script" not in outside_code
    assert "[bold]no[/bold]" in results_text(result)


def test_no_path_of_this_machine_is_published() -> None:
    assert "/home/me" not in html_report(make_result(), make_extras())
    assert "/home/me" not in model_card(make_result(), make_extras())
    assert "# out.gguf" in model_card(make_result(), make_extras())


def test_the_front_matter_is_yaml_whatever_the_model_is_called() -> None:
    card = model_card(make_result(), make_extras(base_model='a: "b"\n- c', license="mit"))
    front = card.split("---\n")[1]
    assert 'base_model: "a: \\"b\\"\\n- c"' in front
    assert 'license: "mit"' in front


def test_plain_text_is_never_folded_and_has_no_escapes() -> None:
    text = results_text(make_result())
    assert "\x1b" not in text
    assert sum("ours, task imatrix" in line for line in text.splitlines()) == 3
    wide = results_text(make_result(), width=140, color=True)
    assert "\x1b" in wide
    narrow = results_text(make_result(), width=80)
    assert max(map(len, narrow.splitlines())) <= 80


def test_verdicts_without_a_gain_say_so() -> None:
    result = make_result()
    result["target_kld_ratio"] = {"value": 0.9, "low": None, "high": None}
    result["verdict"] = "no difference shown"
    assert "too few documents for an interval" in verdict_sentence(result)
    result["target_kld_ratio"] = interval(1.3)
    result["verdict"], result["chosen"] = "worse, baseline written", result["baseline"]
    sentence = verdict_sentence(result)
    assert sentence.startswith("Worse, baseline written: on code, our best layout has 1.300 times")
    assert "KLD of our best layout over" in html_report(result, make_extras())
    assert "KLD of our best layout over" in model_card(result, make_extras())
    assert "ours / =" in results_text(result)
    result["target_kld_ratio"] = interval(None)
    assert verdict_sentence(result).startswith("No verdict")
    parsed(html_report(result, make_extras()))


def test_the_two_by_two_needs_its_cells() -> None:
    result = make_result()
    assert "each bought" in html_report(result, make_extras())
    result["files"] = [f for f in result["files"] if f["imatrix"] == "task"]
    assert "each bought" not in html_report(result, make_extras())


def test_damage_below_the_noise_is_not_measurable() -> None:
    extras = make_extras()
    assert extras.damage_map is not None
    quiet = damage_heat_map(extras.damage_map, "code", noise_nats=1e-6)
    assert "not measurable" not in quiet
    loud = damage_heat_map(extras.damage_map, "code", noise_nats=0.01)
    assert loud.count("not measurable") == loud.count('class="empty"') > 0
    assert damage_heat_map(extras.damage_map, "poetry") == ""


def test_the_damage_map_survives_parquet_and_missing_values() -> None:
    damage = make_extras().damage_map
    assert damage is not None
    damage = damage.astype({"layer": "float64"})  # what a column with holes becomes
    damage.loc[0, "kld_nats"] = float("nan")
    damage["se"] = float("nan")
    figure = damage_heat_map(damage, "code")
    assert ">–</text>" in figure or ">0</text>" in figure
    assert "nan" not in figure
    equal = damage.assign(kld_nats=0.5)
    assert "rgb(" in damage_heat_map(equal, "code")


def test_a_large_model_keeps_its_cells_and_drops_their_text() -> None:
    tensors = pd.DataFrame([
        {"tensor": f"blk.{i}.ffn_up.weight", "role": "ffn_up", "layer": i, "n_elements": 256}
        for i in range(90)
    ])  # fmt: skip
    figure = layout_by_depth(dict.fromkeys(tensors["tensor"], "IQ2_XXS"), tensors)
    assert figure.count("<rect") == 90
    assert ">IQ2_XXS</text>" not in figure


def test_shares_are_of_weights_and_sum_to_one() -> None:
    extras = make_extras()
    assert extras.tensors is not None
    shares = shares_by_type(extras.layouts["ours, task imatrix"], extras.tensors)
    assert sum(share for _, _, share in shares) == pytest.approx(1.0)
    assert sum(n for _, n, _ in shares) == len(extras.tensors)
    assert shares_by_type({}, extras.tensors) == []


@pytest.mark.parametrize(
    ("value", "se", "text"),
    [
        (0.0331, 0.0029, "0.0331 ± 0.0029"),
        (0.5, 0.12, "0.50 ± 0.12"),
        (1.9e-5, 3e-6, "0.0000190 ± 0.0000030"),
        (0.0331, None, "0.0331"),
        (0.0, 0.0, "0"),
        (None, None, "no data"),
    ],
)
def test_decimals_follow_the_error(value: float | None, se: float | None, text: str) -> None:
    assert kld_text(value, se) == text


def test_sizes_have_four_digits_in_decimal_units() -> None:
    sizes = [862_238_976, 2_200_000, 13_260_000_000, 999, 12_346]
    expected = ["862.2 MB", "2.200 MB", "13.26 GB", "999 bytes", "12.35 kB"]
    assert [size_text(s) for s in sizes] == expected


def test_markdown_leaves_type_names_readable() -> None:
    assert markdown("Q3_K_S | *x* <b>") == "Q3_K_S \\| \\*x\\* &lt;b&gt;"


def test_reports_are_deterministic() -> None:
    first = html_report(make_result(), make_extras())
    assert first == html_report(make_result(), replace(make_extras()))
