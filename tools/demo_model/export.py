"""Write the trained model as GGUF: ``python -m tools.demo_model.export --run run --out FILE``."""

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from bitwright.corpora.generators.chatml import (
    BOS,
    CHAT_TEMPLATE,
    CONTROL_TOKENS,
    END,
    USER_TOKENS,
)
from tools.demo_model.network import Shape

DESCRIPTION = "Demo model of Bitwright, trained on generated text and Python's standard library"
LICENSE = "MIT; trained on generated text and PSF-2.0 sources"
FILE_TYPES = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
}


def export(run: Path, out: Path, kind: str = "F16") -> None:
    """Write ``run``'s checkpoint and tokenizer to ``out``; norms stay F32."""
    saved = torch.load(run / "checkpoint.pt", weights_only=True)
    tokenizer = json.loads((run / "tokenizer.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(str(out), "llama")
    _add_model(writer, Shape(**saved["shape"]), kind)
    _add_tokenizer(writer, tokenizer["model"])
    for name, weight in saved["model"].items():
        _add_weight(writer, name, weight.float().numpy(), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_model(writer: Any, shape: Shape, kind: str) -> None:
    writer.add_name("bitwright-demo")
    writer.add_description(DESCRIPTION)
    writer.add_license(LICENSE)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_file_type(FILE_TYPES[kind])


def _add_tokenizer(writer: Any, model: dict[str, Any]) -> None:
    ids: dict[str, int] = model["vocab"]
    tokens = sorted(ids, key=lambda token: ids[token])
    types = dict.fromkeys(CONTROL_TOKENS, gguf.TokenType.CONTROL)
    types |= dict.fromkeys(USER_TOKENS, gguf.TokenType.USER_DEFINED)
    # Older versions of the tokenizers package write a merge as one string, newer ones as a pair.
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([types.get(token, gguf.TokenType.NORMAL) for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(ids[BOS])
    writer.add_eos_token_id(ids[END])
    writer.add_pad_token_id(ids[BOS])
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_weight(writer: Any, name: str, values: np.ndarray[Any, Any], kind: str) -> None:
    """Parameter names are the GGUF's own, so nothing is renamed."""
    if values.ndim == 1 or kind == "F32":
        writer.add_tensor(name, values.astype(np.float32))
    elif kind == "F16":
        writer.add_tensor(name, values.astype(np.float16))
    else:
        bf16 = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(name, gguf.quants.quantize(values, bf16), raw_dtype=bf16)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write the trained demo model as GGUF.")
    parser.add_argument("--run", type=Path, default=Path("run"))
    parser.add_argument("--out", type=Path, default=Path("demo-F16.gguf"))
    parser.add_argument("--type", choices=sorted(FILE_TYPES), default="F16")
    given = parser.parse_args()
    export(given.run, given.out, given.type)
    print(f"{given.out}: {given.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
