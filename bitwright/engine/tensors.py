"""What a tensor is, read from its name and shape: role, layer, and whether it may be quantized.

The rules are those of llama.cpp's quantizer (tensor_allows_quantization in src/llama-quant.cpp
of the pinned build), kept here as data.
"""

import re

from bitwright.engine.ggml_types import FLOAT, TYPES
from bitwright.engine.gguf_file import TensorInfo

BLOCK = re.compile(r"(?:^|(?<=\.))blk\.(\d+)\.")
BLOCK_AT_START = re.compile(r"blk\.(\d+)")
SUFFIX = "weight"

TOKEN_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
OUTPUT = "output.weight"
HEADS = frozenset(
    {*TOKEN_EMBEDDINGS, OUTPUT}
)  # not part of the body; exempt from needing importance

# Small or sensitive tensors that stay as they are, whatever their shape.
NEVER_NAMED = frozenset({"position_embd.weight", "token_types.weight"})
NEVER_CONTAINING = (
    "_norm.weight",
    # routers: their error picks other experts
    *("ffn_gate_inp.weight", "ffn_gate_tid2eid.weight"),
    # Gemma 3n
    *("altup", "laurel", "per_layer_model_proj"),
    # short convolutions
    *("ssm_conv1d", "shortconv.conv.weight"),
    # MiniMax's indexer
    *("indexer.k_proj.weight", "indexer.q_proj.weight"),
    # RWKV's small matrices
    *(f"time_mix_{part}.weight" for part in ("first", "w0", "w1", "w2", "v0", "v1", "v2")),
    *(f"time_mix_{part}.weight" for part in ("a0", "a1", "a2", "g1", "g2")),
    *(f"time_mix_{part}.weight" for part in ("decay_w1", "decay_w2", "lerp_fused")),
    # T5's relative positions
    "attn_rel_b.weight",
    # pictures
    *(".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos"),
    *(".patch_embd", ".patch_merger"),
    # sound
    *("a.rvq.codebook", "mm.a.code_embd"),
)
NEVER_IN_ARCH = {
    "glm5-next": (
        *("hc_", "indexer.attn_q_b", "indexer.attn_k", "indexer.proj"),
        *("indexer_compressor_gate", "indexer_compressor_ape", "attn_kv_a_mqa.weight"),
        *("ssm_f_a.weight", "ssm_f_b.weight", "ssm_g_a.weight", "ssm_g_b.weight"),
        *("ssm_beta.weight", "attn_k_b.weight", "attn_v_b.weight"),
    )
}


def role(name: str) -> str:
    """The name without its block and without '.weight': 'attn_q', 'ffn_down_exps', 'output'."""
    return BLOCK.sub("", name, count=1).removesuffix(".weight")


def layer(name: str) -> int | None:
    """The block number, or None outside blocks."""
    found = BLOCK.search(name)
    return int(found.group(1)) if found else None


def file_order(name: str) -> tuple[int, str]:
    """Sort key of llama.cpp's loader and quantizer: by block, tensors without one first."""
    found = BLOCK_AT_START.match(name)
    return (int(found.group(1)) if found else -1, name)


def n_dims(shape: tuple[int, ...]) -> int:
    """Dimensions as ggml counts them: trailing ones do not count."""
    return max((i + 1 for i, size in enumerate(shape) if size > 1), default=1)


def name_allows(name: str, arch: str = "") -> bool:
    """Whether llama.cpp's quantizer would touch a tensor of that name."""
    if not name.endswith(SUFFIX) or name in NEVER_NAMED:
        return False
    return not any(part in name for part in (*NEVER_CONTAINING, *NEVER_IN_ARCH.get(arch, ())))


def is_quantizable(info: TensorInfo, arch: str) -> bool:
    """Whether the tensor may get another type.

    One and four dimensions, integer types and the names of llama.cpp's list stay as they are.
    """
    kind = TYPES[info.type]
    convertible = kind.name in FLOAT or kind.is_quantized
    return convertible and 2 <= n_dims(info.shape) <= 3 and name_allows(info.name, arch)


def is_body(name: str) -> bool:
    """Quantizable by name, and neither token embedding nor output."""
    return name_allows(name) and name not in HEADS


def needs_imatrix(name: str, type_name: str, *, q2_k_s: bool = False) -> bool:
    """Whether llama.cpp refuses this type for this tensor without importance.

    Args:
        q2_k_s: the file is a Q2_K_S mix, where Q2_K needs it too.
    """
    if name in HEADS:
        return False
    return TYPES[type_name].needs_imatrix or (q2_k_s and type_name == "Q2_K")
