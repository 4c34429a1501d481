import pytest

from bitwright.allocator.budget import parse_budget, resolve_budget
from bitwright.engine.model_file import open_model
from bitwright.errors import ConfigError
from tests.tiny import tiny_gguf

STOCK = {"Q3_K_S": 1_000_000, "Q4_K_M": 1_234_567}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return open_model(tiny_gguf(tmp_path_factory.mktemp("budget") / "m-F16.gguf", n_layer=1))


def resolved(text, model):
    return resolve_budget(parse_budget(text), model, STOCK.__getitem__)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (861222144, 861222144),
        ("861222144", 861222144),
        ("861_222_144 bytes", 861222144),
        ("6.1 GB", 6_100_000_000),
        ("6.1GB", 6_100_000_000),
        ("1.5 MiB", 1_572_864),
        ("300 kB", 300_000),
        ("300 KiB", 307_200),
        ("5.7 gib", 57 * (1 << 30) // 10),
        ("0.1 KiB", 102),
        ("Q3_K_S", 1_000_000),
        ("q3_k_s", 1_000_000),
        ("Q4_K", 1_234_567),
        ("Q3_K_S + 0.12 %", 1_001_200),
        ("Q3_K_S+0.12%", 1_001_200),
        ("Q3_K_S - 1 %", 990_000),
        ("Q3_K_S − 1 %", 990_000),
        ("Q3_K_S + 10 MB", 11_000_000),
        ("Q3_K_S - 10 KiB", 989_760),
        ("Q4_K_M + 0.0001 %", 1_234_568),
    ],
)
def test_every_form_resolves_exactly(text, expected, model):
    assert resolved(text, model) == expected


def test_bits_per_weight_count_all_weights_of_the_model(model):
    weights = sum(t.n_elements for t in model.tensors)
    assert resolved("3.5 bpw", model) == int(weights * 3.5 / 8)


def test_stock_sizes_are_asked_for_only_when_needed(model):
    def never(name):
        raise AssertionError(name)

    assert resolve_budget(parse_budget("1 MB"), model, never) == 1_000_000
    assert parse_budget("1 MB").stock is None
    assert parse_budget("Q4_K + 1 %").stock == "Q4_K_M"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-5",
        "-5 GB",
        "1.5",
        "1.5 bytes",
        "6 G",
        "6,1 GB",
        "1e9",
        "nan",
        "inf GB",
        "3 %",
        "Q3_K_S * 2",
        "Q3_K_S +",
        "Q3_K_S + 0.1 bpw",
        "Q3_K_S + x",
        "Q3_K_S 0.12 %",
        "Q9_Z",
        "9" * 200,
        True,
        3.5,
        None,
    ],
)
def test_anything_else_is_refused_with_the_forms(text):
    with pytest.raises(ConfigError, match="write it as"):
        parse_budget(text)


def test_a_budget_of_nothing_is_refused(model):
    with pytest.raises(ConfigError, match="leaves"):
        resolved("Q3_K_S - 100 %", model)
    with pytest.raises(ConfigError, match="leaves"):
        resolved("Q3_K_S - 1 GB", model)
