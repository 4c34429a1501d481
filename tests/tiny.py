"""Tiny GGUF models that llama.cpp loads and runs in milliseconds.

They are written with the ``gguf`` package, not with Bitwright's own writer, so that they are
also an independent oracle of the format.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n'"
    " + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "h e", "Ġ t", "Ġt he", "i n", "r e", "a n", "Ġ a", "o n", "e r", "Ġ =", "d e")
ROUTED_AWAY = 100.0  # size of the router row that keeps one expert from being chosen

Extra = Mapping[str, np.ndarray | tuple[np.ndarray, str]]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that decide every tensor's shape."""

    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_kv: int
    n_vocab: int
    n_expert: int


def byte_tokens() -> list[str]:
    """The 256 printable stand-ins that GPT-2's tokenizer uses for bytes, in byte order."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(hidden)) for byte in range(256)]


def vocabulary(n_vocab: int) -> tuple[list[str], list[int]]:
    """Token texts and types: bytes, merges, specials (control), then filler up to ``n_vocab``."""
    tokens = byte_tokens() + [m.replace(" ", "") for m in MERGES]
    types = [int(gguf.TokenType.NORMAL)] * len(tokens)
    tokens += SPECIALS
    types += [int(gguf.TokenType.CONTROL)] * len(SPECIALS)
    filler = max(0, n_vocab - len(tokens))
    tokens += [f"<filler_{i}>" for i in range(filler)]
    types += [int(gguf.TokenType.UNUSED)] * filler
    return tokens, types


def tiny_gguf(
    path: Path,
    *,
    arch: str = "llama",
    n_layer: int = 2,
    n_embd: int = 256,
    n_ff: int = 512,
    n_head: int = 4,
    n_kv: int = 2,
    n_vocab: int = 288,
    tied: bool = True,
    n_expert: int = 0,
    n_expert_used: int = 2,
    dtype: str = "F16",
    add_bos: bool = True,
    chat_template: str | None = CHATML,
    seed: int = 0,
    extra_tensors: Extra | None = None,
    extra_kv: Mapping[str, str | int | float | bool | Sequence[str]] | None = None,
    never_route: int | None = None,
    alignment: int | None = None,
) -> Path:
    """Write a runnable model with random weights and return its path.

    Args:
        dtype: type of the 2-D and 3-D weights: F32, F16, BF16, or Q8_0 / Q4_0 / Q5_0 … as far
            as the gguf package can pack it.
        extra_tensors: name → array (NumPy order), or (array, type name). llama.cpp refuses
            tensors it does not expect, so such a file is for the container only.
        never_route: an expert that no token is ever routed to.
    """
    tokens, types = vocabulary(n_vocab)
    shape = Shape(n_layer, n_embd, n_ff, n_head, n_kv, len(tokens), n_expert)
    writer = gguf.GGUFWriter(str(path), arch)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    _add_sizes(writer, shape, n_expert_used)
    _add_tokenizer(writer, tokens, types, add_bos=add_bos, chat_template=chat_template)
    for key, value in (extra_kv or {}).items():
        _add_value(writer, key, value)
    for name, values in _weights(shape, tied=tied, never_route=never_route, seed=seed).items():
        plain = values.ndim == 1 or "ffn_gate_inp" in name
        _add_tensor(writer, name, values, "F32" if plain else dtype)
    for name, extra in (extra_tensors or {}).items():
        values, kind = extra if isinstance(extra, tuple) else (extra, "F32")
        _add_tensor(writer, name, values, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: gguf.GGUFWriter, shape: Shape, n_expert_used: int) -> None:
    writer.add_name("tiny")
    writer.add_context_length(2048)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.n_embd // shape.n_head)
    writer.add_vocab_size(shape.n_vocab)
    if shape.n_expert:
        writer.add_expert_count(shape.n_expert)
        writer.add_expert_used_count(n_expert_used)


def _add_tokenizer(
    writer: gguf.GGUFWriter,
    tokens: list[str],
    types: list[int],
    *,
    add_bos: bool,
    chat_template: str | None,
) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(add_bos)
    if chat_template is not None:
        writer.add_chat_template(chat_template)


def _add_value(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    if kind == "F32":
        writer.add_tensor(name, values.astype(np.float32))
    elif kind == "F16":
        writer.add_tensor(name, values.astype(np.float16))
    else:
        raw_dtype = gguf.GGMLQuantizationType[kind]
        packed = gguf.quants.quantize(values.astype(np.float32), raw_dtype)
        writer.add_tensor(name, packed, raw_dtype=raw_dtype)


def _weights(
    shape: Shape, *, tied: bool, never_route: int | None, seed: int
) -> dict[str, np.ndarray]:
    """Every tensor, NumPy order (rows first); matrices scaled by their number of inputs."""
    rng = np.random.default_rng(seed)

    def matrix(*sizes: int) -> np.ndarray:
        return rng.standard_normal(sizes, dtype=np.float32) / np.float32(np.sqrt(sizes[-1]))

    def norm() -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(shape.n_embd)).astype(np.float32)

    width, wide, n_kv_rows = shape.n_embd, shape.n_ff, shape.n_embd // shape.n_head * shape.n_kv
    weights = {"token_embd.weight": 3 * matrix(shape.n_vocab, width)}
    for i in range(shape.n_layer):
        block = {
            "attn_norm": norm(),
            "attn_q": matrix(width, width),
            "attn_k": matrix(n_kv_rows, width),
            "attn_v": matrix(n_kv_rows, width),
            "attn_output": matrix(width, width),
            "ffn_norm": norm(),
        }
        if shape.n_expert:
            block["ffn_gate_inp"] = matrix(shape.n_expert, width)
            block["ffn_gate_exps"] = matrix(shape.n_expert, wide, width)
            block["ffn_up_exps"] = matrix(shape.n_expert, wide, width)
            block["ffn_down_exps"] = matrix(shape.n_expert, width, wide)
        else:
            block["ffn_gate"] = matrix(wide, width)
            block["ffn_up"] = matrix(wide, width)
            block["ffn_down"] = matrix(width, wide)
        weights |= {f"blk.{i}.{role}.weight": values for role, values in block.items()}
    weights["output_norm.weight"] = norm()
    if not tied:
        weights["output.weight"] = 3 * matrix(shape.n_vocab, width)
    if never_route is not None:
        _avoid_expert(weights, never_route)
    return weights


def _avoid_expert(weights: dict[str, np.ndarray], expert: int) -> None:
    """Keep channel 0 of the residual stream positive and let the router row look only at it."""
    weights["token_embd.weight"][:, 0] = 1.0
    for name, values in weights.items():
        if "attn_output" in name or "ffn_down" in name:
            values[..., 0, :] = 0.0
        elif "ffn_gate_inp" in name:
            values[:, 0] = 0.0
            values[expert] = 0.0
            values[expert, 0] = -ROUTED_AWAY


def split_gguf(path: Path, n: int) -> list[Path]:
    """Split a file into ``n`` shards as llama-gguf-split does: metadata only in the first."""
    reader = gguf.GGUFReader(str(path))
    groups = np.array_split(np.arange(len(reader.tensors)), n)
    shards = []
    for number, group in enumerate(groups):
        shard = path.with_name(f"{path.stem}-{number + 1:05d}-of-{n:05d}.gguf")
        arch = str(reader.fields["general.architecture"].contents())
        writer = gguf.GGUFWriter(str(shard), arch)
        writer.kv_data[0].clear()
        if number == 0:
            _copy_fields(reader, writer)
            writer.data_alignment = reader.alignment
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", n)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for index in group:
            tensor = reader.tensors[int(index)]
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        shards.append(shard)
    return shards


def _copy_fields(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub_type=sub)
