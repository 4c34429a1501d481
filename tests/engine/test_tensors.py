import pytest

from bitwright.engine.gguf_file import TensorInfo
from bitwright.engine.tensors import (
    file_order,
    is_body,
    is_quantizable,
    layer,
    n_dims,
    needs_imatrix,
    role,
)


def info(name, shape=(256, 8), kind="F16"):
    return TensorInfo(name, shape, kind, 0, 0)


@pytest.mark.parametrize(
    ("name", "expected_role", "expected_layer"),
    [
        ("blk.0.attn_q.weight", "attn_q", 0),
        ("blk.17.ffn_down_exps.weight", "ffn_down_exps", 17),
        ("blk.3.attn_q.bias", "attn_q.bias", 3),
        ("token_embd.weight", "token_embd", None),
        ("output.weight", "output", None),
        ("enc.blk.2.attn_v.weight", "enc.attn_v", 2),
        ("blk.4.ffn_gate.7.weight", "ffn_gate.7", 4),
    ],
)
def test_role_and_layer(name, expected_role, expected_layer):
    assert role(name) == expected_role
    assert layer(name) == expected_layer


def test_order_is_by_block_number_then_bytes():
    names = ["blk.10.a", "blk.2.b", "token_embd.weight", "blk.2.a", "output.weight", "enc.blk.1.a"]
    assert sorted(names, key=file_order) == [
        *("enc.blk.1.a", "output.weight", "token_embd.weight"),
        *("blk.2.a", "blk.2.b", "blk.10.a"),
    ]


def test_dimensions_do_not_count_trailing_ones():
    assert [n_dims(s) for s in ((), (5,), (5, 1), (1, 5), (4, 4, 1, 1), (4, 1, 3))] == [
        *(1, 1, 1, 2, 2, 3)
    ]


NEVER = [
    *("blk.0.ffn_gate_inp.weight", "blk.0.ffn_gate_tid2eid.weight", "blk.0.attn_norm.weight"),
    *("blk.0.ssm_conv1d.weight", "blk.0.shortconv.conv.weight", "blk.0.ssm_a"),
    *("position_embd.weight", "token_types.weight", "v.position_embd.weight"),
    *("blk.0.altup_router.weight", "blk.0.laurel_l.weight", "per_layer_model_proj.weight"),
    *("blk.0.time_mix_first.weight", "blk.0.time_mix_w1.weight", "blk.0.time_mix_g2.weight"),
    *("blk.0.time_mix_decay_w2.weight", "blk.0.time_mix_lerp_fused.weight"),
    *("enc.blk.0.attn_rel_b.weight", "v.patch_embd.weight", "v.patch_merger.weight"),
    *("blk.0.indexer.k_proj.weight", "a.rvq.codebook.weight", "blk.0.attn_q.bias"),
]


@pytest.mark.parametrize("name", NEVER)
def test_never_quantized(name):
    assert not is_quantizable(info(name), "llama")
    assert not is_body(name)


@pytest.mark.parametrize(
    ("shape", "kind", "expected"),
    [
        ((256, 8), "F16", True),
        ((4, 4), "F32", True),
        ((256, 8, 4), "BF16", True),
        ((256, 8), "Q8_0", True),
        ((256,), "F32", False),
        ((256, 1), "F32", False),
        ((256, 8, 4, 2), "F16", False),
        ((256, 8), "I32", False),
    ],
)
def test_shape_and_type_decide_too(shape, kind, expected):
    assert is_quantizable(info("blk.0.attn_q.weight", shape, kind), "llama") is expected


def test_one_architecture_keeps_more():
    assert is_quantizable(info("blk.0.attn_k_b.weight"), "deepseek2")
    assert not is_quantizable(info("blk.0.attn_k_b.weight"), "glm5-next")


def test_body_is_without_embedding_and_output():
    assert is_body("blk.0.attn_q.weight")
    for name in ("token_embd.weight", "per_layer_token_embd.weight", "output.weight"):
        assert is_quantizable(info(name), "llama")
        assert not is_body(name)


@pytest.mark.parametrize("low", ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"])
def test_types_that_need_an_imatrix(low):
    assert needs_imatrix("blk.0.attn_q.weight", low)
    for name in ("token_embd.weight", "per_layer_token_embd.weight", "output.weight"):
        assert not needs_imatrix(name, low)


def test_q2_k_needs_it_only_in_its_small_mix():
    assert not needs_imatrix("blk.0.attn_q.weight", "Q2_K")
    assert needs_imatrix("blk.0.attn_q.weight", "Q2_K", q2_k_s=True)
    assert not needs_imatrix("output.weight", "Q2_K", q2_k_s=True)
    assert not needs_imatrix("blk.0.attn_q.weight", "IQ3_S", q2_k_s=True)
