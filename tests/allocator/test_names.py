import pytest

from bitwright.allocator.layout import Layout
from bitwright.allocator.names import body_shares, file_stem, honest_name
from bitwright.engine.model_file import open_model
from bitwright.engine.tensors import is_body, is_quantizable
from bitwright.errors import ConfigError
from tests.tiny import tiny_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The body has 14 tensors of equal size, so that shares are fourteenths."""
    path = tmp_path_factory.mktemp("names") / "m-F16.gguf"
    return open_model(tiny_gguf(path, n_layer=2, n_ff=256, n_kv=4, tied=False))


def body(model):
    return [t.name for t in model.tensors if is_body(t.name) and is_quantizable(t, model.arch)]


def layout(model, n_named, named, rest, **others):
    names = body(model)
    types = {n: named if i < n_named else rest for i, n in enumerate(names)}
    return types | {"token_embd.weight": "Q6_K", "output.weight": "Q6_K"} | others


def name_of(model, types, size_bytes=1_000_000):
    return honest_name(types, model, target="code", size_bytes=size_bytes)


def test_shares_count_the_body_only_and_sum_to_one(model):
    types = layout(model, 7, "Q3_K", "Q4_K")
    shares = body_shares(Layout(types), model)
    assert len(body(model)) == 14
    assert [one.type for one in shares] == ["Q3_K", "Q4_K"]
    assert sum(one.by_weights for one in shares) == pytest.approx(1)
    assert {one.by_tensors for one in shares} == {0.5}
    assert body_shares(types, model) == shares
    assert body_shares({}, model)[0].type == "F16"


@pytest.mark.parametrize(
    ("n_named", "named", "rest", "expected"),
    [
        (14, "Q3_K", "Q4_K", "Q3_K_S"),
        (13, "Q3_K", "Q4_K", "Q3_K_S"),
        (12, "Q3_K", "Q4_K", "Q3_K_M"),
        (10, "Q3_K", "Q4_K", "Q3_K_M"),
        (9, "Q3_K", "Q4_K", "Q3_K_L"),
        (13, "Q4_K", "Q6_K", "Q4_K_S"),
        (10, "Q4_K", "Q6_K", "Q4_K_M"),
        (13, "Q6_K", "Q4_K", "Q6_K"),
        (13, "IQ3_S", "Q4_K", "IQ3_S"),
        (13, "IQ4_XS", "Q4_K", "IQ4_XS"),
    ],
)
def test_a_name_is_earned_by_the_share_of_weights(model, n_named, named, rest, expected):
    found = name_of(model, layout(model, n_named, named, rest))
    assert found.name == expected
    assert named in found.reason


@pytest.mark.parametrize(
    ("n_named", "named", "rest"),
    [(9, "Q4_K", "Q6_K"), (12, "Q6_K", "Q4_K"), (12, "IQ3_S", "Q4_K"), (14, "Q3_K", "")],
)
def test_otherwise_the_name_is_neutral(model, n_named, named, rest):
    types = layout(model, n_named, named, rest)
    if not rest:
        types["token_embd.weight"] = "IQ3_S"  # mixing: a K name with an IQ type anywhere inside
    weights = sum(t.n_elements for t in model.tensors)
    found = name_of(model, types, size_bytes=weights * 381 // 800)
    assert found.name == "code-3.81bpw"


def test_the_boundary_of_a_share_belongs_to_the_name(model):
    sizes = {n: model.tensor(n).n_elements for n in body(model)}
    assert len(set(sizes.values())) == 1  # as the fixture promises
    assert name_of(model, layout(model, 7, "Q3_K", "Q4_K")).name == "Q3_K_L"


@pytest.mark.parametrize(
    ("model_name", "name", "expected"),
    [
        ("demo-F16", "code-3.81bpw", "demo-code-3.81bpw"),
        ("demo-F16", "Q3_K_S", "demo-code-Q3_K_S"),
        ("Qwen2.5-Coder-1.5B-bf16", "Q3_K_S", "Qwen2.5-Coder-1.5B-code-Q3_K_S"),
        ("model.fp32", "Q3_K_S", "model-code-Q3_K_S"),
        ("F16", "Q3_K_S", "F16-code-Q3_K_S"),
        ("a b/c:d", "Q3_K_S", "a-b-c-d-code-Q3_K_S"),
        ("../../etc", "Q3_K_S", "etc-code-Q3_K_S"),
        ("日本", "Q3_K_S", "code-Q3_K_S"),
    ],
)
def test_file_stems_are_safe_and_without_the_old_precision(model_name, name, expected):
    assert file_stem(model_name, "code", name) == expected


def test_long_and_empty_stems():
    assert len(file_stem("x" * 500, "code", "Q3_K_S")) <= 120
    with pytest.raises(ConfigError, match="no file name"):
        file_stem("/", "/", "/")
