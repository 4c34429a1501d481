"""A damage map with the official tools alone: one file and one evaluation per tensor."""

import argparse
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.damage_bench import PROBE_TYPE, Bench
from bitwright.damage.probe import probe_types
from bitwright.engine.imatrix_file import write_imatrix
from bitwright.engine.session import resolve_threads
from bitwright.engine.tokenizer import Tokenizer


def naive_seconds(bench: Bench, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Wall seconds for all tensors on the base tokens and on all the text, from a sample.

    llama-perplexity scores the second half of each chunk, so it needs no more tokens for the same
    passes; its base logits are computed once and counted once.
    """
    text, imatrix = folder / "text.txt", folder / "imatrix.gguf"
    with Tokenizer(bench.model) as tokenizer:
        parts = [tokenizer.decode(chunk.tokens) for chunk in bench.chunks]
    # Decoded text may give fewer tokens than it had, and two chunks are the least it takes.
    text.write_text("\n".join(parts * 2), encoding="utf-8")
    write_imatrix(bench.imatrix, imatrix)
    tools = Tools(arguments, bench, text, imatrix, folder)
    count = min(arguments.naive_tensors, len(bench.tensors))
    picked = np.linspace(0, len(bench.tensors) - 1, count).round().astype(int)
    pairs = probe_types(bench.model, [bench.tensors[i] for i in picked], PROBE_TYPE)
    base_s = tools.base(len(bench.base))
    quantize_s = [tools.quantize(*pair) for pair in pairs]
    score_s = [tools.score(pair[0], len(bench.base)) for pair in pairs]
    n = len(bench.tensors)
    per_chunk = len(bench.chunks) / len(bench.base)
    each_quantize, each_score = float(np.mean(quantize_s)), float(np.mean(score_s))
    return {
        "naive_s": base_s + n * (each_quantize + each_score),
        "naive_all_text_s": per_chunk * base_s + n * (each_quantize + per_chunk * each_score),
        "naive_sampled_tensors": count,
        "naive_quantize_s": each_quantize,
        "naive_perplexity_s": each_score,
        "naive_note": f"extrapolated from {count} of {n} tensors",
    }


class Tools:
    """The official command-line tools on one model."""

    def __init__(
        self, arguments: argparse.Namespace, bench: Bench, text: Path, imatrix: Path, folder: Path
    ) -> None:
        self.bin, self.bench, self.folder = arguments.llama_bin, bench, folder
        self.text, self.imatrix = text, imatrix
        self.threads = str(resolve_threads(arguments.threads))
        self.n_ctx = str(arguments.tokens)
        self.logits = folder / "base.kld"

    def base(self, chunks: int) -> float:
        return self._perplexity(self.bench.model.path, chunks, [])

    def quantize(self, tensor: str, type_name: str) -> float:
        rules, own = self.folder / "rules.txt", self.bench.model.reference_type
        rules.write_text(f"^{re.escape(tensor)}$={type_name}\n.*={own}\n", encoding="utf-8")
        return self._run(
            "llama-quantize",
            [
                *("--imatrix", str(self.imatrix), "--tensor-type-file", str(rules)),
                *(str(self.bench.model.path), str(self._file(tensor)), "Q8_0", self.threads),
            ],
        )

    def score(self, tensor: str, chunks: int) -> float:
        return self._perplexity(self._file(tensor), chunks, ["--kl-divergence"])

    def _file(self, tensor: str) -> Path:
        return self.folder / f"{tensor}.gguf"

    def _perplexity(self, model: Path, chunks: int, more: Sequence[str]) -> float:
        return self._run(
            "llama-perplexity",
            [
                *("-m", str(model), "-f", str(self.text), "-c", self.n_ctx, "-b", self.n_ctx),
                *("--chunks", str(chunks), "-t", self.threads),
                *("--kl-divergence-base", str(self.logits), *more),
            ],
        )

    def _run(self, tool: str, options: Sequence[str]) -> float:
        started = time.perf_counter()
        done = subprocess.run([str(self.bin / tool), *options], capture_output=True, check=False)
        if done.returncode:
            raise SystemExit(f"{tool} failed: {done.stderr.decode(errors='replace')[-800:]}")
        return time.perf_counter() - started
