"""Tiny models of further architectures, for what a graph of theirs does that llama's does not.

qwen2: biases on query, key and value. gemma3: sliding window, query and key norms, scaled
embedding. qwen2moe: shared expert beside the routed ones. mamba: recurrent state, no attention.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np

from tests.tiny import _add_tensor, _add_tokenizer, vocabulary

WIDTH, WIDE, HEADS, KV_HEADS, HEAD_SIZE = 64, 96, 4, 2, 16
EXPERTS, EXPERTS_USED = 4, 2
STATE, CONV, INNER, RANK = 16, 4, 128, 4

PLAIN = ("ffn_gate_inp", "ssm_conv1d", "ssm_a", "ssm_dt", "ssm_x")

Weights = dict[str, np.ndarray]
Draw = Callable[..., np.ndarray]


def tiny_arch_gguf(path: Path, arch: str, *, n_layer: int = 3, tied: bool = False) -> Path:
    """Write a runnable model of `arch` with random F16 weights and return its path."""
    tokens, types = vocabulary(288)
    writer = gguf.GGUFWriter(str(path), arch)
    _add_sizes(writer, n_layer, len(tokens))
    for add, key, value in EXTRA_KEYS.get(arch, ()):
        getattr(writer, add)(key.format(arch=arch), value)
    _add_tokenizer(writer, tokens, types, add_bos=True, chat_template=None)
    for name, values in _weights(arch, n_layer, len(tokens), tied=tied).items():
        plain = values.ndim == 1 or any(mark in name for mark in PLAIN)
        _add_tensor(writer, name, values, "F32" if plain else "F16")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


EXTRA_KEYS: Mapping[str, tuple[tuple[str, str, int], ...]] = {
    "gemma3": (
        ("add_uint32", "{arch}.attention.sliding_window", 16),
        ("add_uint32", "{arch}.attention.key_length", HEAD_SIZE),
        ("add_uint32", "{arch}.attention.value_length", HEAD_SIZE),
    ),
    "qwen2moe": (
        ("add_uint32", "{arch}.expert_count", EXPERTS),
        ("add_uint32", "{arch}.expert_used_count", EXPERTS_USED),
        ("add_uint32", "{arch}.expert_feed_forward_length", WIDE),
        ("add_uint32", "{arch}.expert_shared_feed_forward_length", WIDE),
    ),
    "mamba": (
        ("add_uint32", "{arch}.ssm.conv_kernel", CONV),
        ("add_uint32", "{arch}.ssm.inner_size", INNER),
        ("add_uint32", "{arch}.ssm.state_size", STATE),
        ("add_uint32", "{arch}.ssm.time_step_rank", RANK),
    ),
}


def _add_sizes(writer: gguf.GGUFWriter, n_layer: int, n_vocab: int) -> None:
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(n_vocab)


def _weights(arch: str, n_layer: int, n_vocab: int, *, tied: bool) -> Weights:
    rng = np.random.default_rng(7)

    def draw(*sizes: int, mean: float = 0.0) -> np.ndarray:
        spread = 0.1 if len(sizes) == 1 else 1 / np.sqrt(sizes[-1])
        return (mean + spread * rng.standard_normal(sizes)).astype(np.float32)

    weights = {"token_embd.weight": 3 * draw(n_vocab, WIDTH)}
    for i in range(n_layer):
        block = BLOCKS[arch](draw)
        weights |= {f"blk.{i}.{role}": values for role, values in block.items()}
    weights["output_norm.weight"] = draw(WIDTH, mean=1.0)
    if not tied:
        weights["output.weight"] = 3 * draw(n_vocab, WIDTH)
    return weights


def _attention(draw: Draw) -> Weights:
    return {
        "attn_norm.weight": draw(WIDTH, mean=1.0),
        "attn_q.weight": draw(HEADS * HEAD_SIZE, WIDTH),
        "attn_k.weight": draw(KV_HEADS * HEAD_SIZE, WIDTH),
        "attn_v.weight": draw(KV_HEADS * HEAD_SIZE, WIDTH),
        "attn_output.weight": draw(WIDTH, HEADS * HEAD_SIZE),
        "ffn_norm.weight": draw(WIDTH, mean=1.0),
    }


def _biases(draw: Draw) -> Weights:
    return {
        "attn_q.bias": draw(HEADS * HEAD_SIZE),
        "attn_k.bias": draw(KV_HEADS * HEAD_SIZE),
        "attn_v.bias": draw(KV_HEADS * HEAD_SIZE),
    }


def _feed_forward(draw: Draw, suffix: str = "") -> Weights:
    return {
        f"ffn_gate{suffix}.weight": draw(WIDE, WIDTH),
        f"ffn_up{suffix}.weight": draw(WIDE, WIDTH),
        f"ffn_down{suffix}.weight": draw(WIDTH, WIDE),
    }


def _qwen2(draw: Draw) -> Weights:
    return _attention(draw) | _biases(draw) | _feed_forward(draw)


def _gemma3(draw: Draw) -> Weights:
    norms = ("attn_q_norm", HEAD_SIZE), ("attn_k_norm", HEAD_SIZE), ("post_attention_norm", WIDTH)
    more = {f"{name}.weight": draw(size, mean=1.0) for name, size in norms}
    more["post_ffw_norm.weight"] = draw(WIDTH, mean=1.0)
    return _attention(draw) | more | _feed_forward(draw)


def _qwen2moe(draw: Draw) -> Weights:
    experts = {
        "ffn_gate_inp.weight": draw(EXPERTS, WIDTH),
        "ffn_gate_exps.weight": draw(EXPERTS, WIDE, WIDTH),
        "ffn_up_exps.weight": draw(EXPERTS, WIDE, WIDTH),
        "ffn_down_exps.weight": draw(EXPERTS, WIDTH, WIDE),
        "ffn_gate_inp_shexp.weight": draw(WIDTH),
    }
    return _attention(draw) | _biases(draw) | experts | _feed_forward(draw, "_shexp")


def _mamba(draw: Draw) -> Weights:
    return {
        "attn_norm.weight": draw(WIDTH, mean=1.0),
        "ssm_in.weight": draw(2 * INNER, WIDTH),
        "ssm_conv1d.weight": draw(INNER, CONV),
        "ssm_conv1d.bias": draw(INNER),
        "ssm_x.weight": draw(RANK + 2 * STATE, INNER),
        "ssm_dt.weight": draw(INNER, RANK),
        "ssm_dt.bias": draw(INNER, mean=-2.0),
        "ssm_a": -np.exp(draw(INNER, STATE)),
        "ssm_d": draw(INNER, mean=1.0),
        "ssm_out.weight": draw(WIDTH, INNER),
    }


BLOCKS: Mapping[str, Callable[[Draw], Weights]] = {
    "qwen2": _qwen2,
    "gemma3": _gemma3,
    "qwen2moe": _qwen2moe,
    "mamba": _mamba,
}
