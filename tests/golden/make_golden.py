"""Take golden figures from llama.cpp's own tools on the demo model (run by hand, see below).

The tools come from the llama.cpp source inside the llama-cpp-python source archive of the pinned
version (`pip download --no-binary :all: --no-deps llama-cpp-python==VERSION`, unpack, then in
vendor/llama.cpp: `cmake -B build -DLLAMA_CURL=OFF -DCMAKE_BUILD_TYPE=Release` and
`cmake --build build --target llama-imatrix llama-perplexity llama-quantize`). Then:

    python -m tests.golden.make_golden BUILD/bin

It writes llama_cpp_demo.json beside this file, with the commands it ran.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from bitwright.engine.imatrix_file import read_imatrix
from bitwright.engine.model_file import ModelFile, open_model
from bitwright.engine.tokenizer import Tokenizer

N_CTX, N_CHUNKS, COLUMN_STEP = 128, 4, 8
# Repacked weights change the numbers; one thread and one batch per chunk keep them repeatable.
SETTINGS = f"-c {N_CTX} -b {N_CTX} -ub {N_CTX} --chunks {N_CHUNKS} -t 1 --no-repack".split()
FIGURES = {
    "mean_kld_nats": r"Mean +KLD: +([\d.]+)",
    "se_kld_nats": r"Mean +KLD: +[\d.]+ ± +([\d.]+)",
    "max_kld_nats": r"Maximum KLD: +([\d.]+)",
    "median_kld_nats": r"Median +KLD: +([\d.]+)",
    "p99_kld_nats": r"99\.0% +KLD: +([\d.]+)",
    "same_top_percent": r"Same top p: +([\d.]+)",
    "ppl": r"Mean PPL\(Q\) +: +([\d.]+)",
    "ppl_base": r"Mean PPL\(base\) +: +([\d.]+)",
}


def golden_text() -> str:
    """More than N_CTX * N_CHUNKS tokens of code and prose, from a linear congruential generator."""
    verbs, nouns = ("read", "sort", "merge", "check"), ("list", "tree", "file", "table")
    state, lines = 12345, []
    for number in range(60):
        state = (1103515245 * state + 12345) % 2**31
        verb, noun, size = verbs[state >> 8 & 3], nouns[state >> 12 & 3], state >> 16 & 255
        lines.append(f"def {verb}_{noun}_{number}(items, size={size}):")
        lines.append(f"    return [item + {number % 7} for item in items[:size]]")
        lines.append(f"# The {noun} has {size} items; we {verb} it and then stop.")
    return "\n".join(lines)


def make(tools: Path, folder: Path) -> dict[str, object]:
    model = open_model("demo")
    demo, text = str(model.path), folder / "text.txt"
    text.write_text(golden_text())
    imatrix, small, base = (str(folder / n) for n in ("imatrix.gguf", "small.gguf", "base.bin"))
    save = ["--kl-divergence-base", base]
    commands = [
        ["llama-imatrix", "-m", demo, "-f", str(text), "-o", imatrix, *SETTINGS],
        ["llama-quantize", demo, small, "Q3_K_S", "1"],
        ["llama-perplexity", "-m", demo, "-f", str(text), *SETTINGS, *save],
        ["llama-perplexity", "-m", small, *SETTINGS, "--kl-divergence", *save],
    ]
    for name, *arguments in commands:
        done = subprocess.run(
            [tools / name, *arguments], capture_output=True, text=True, check=True
        )
    found = {key: re.search(pattern, done.stdout) for key, pattern in FIGURES.items()}
    return {
        "made_by": [" ".join(c).replace(f"{folder}/", "").replace(demo, "DEMO") for c in commands],
        "weights_sha256": weights_sha256(model),
        "chunks": [chunk.tolist() for chunk in golden_chunks()],
        "imatrix": sample_imatrix(Path(imatrix)),
        "kld_first_row": N_CTX // 2,
        "kld_rows": N_CTX // 2 - 1,
        "kld": {key: float(match[1]) for key, match in found.items() if match},
    }


def golden_chunks() -> list[np.ndarray]:
    """The chunks that the tools make: the text cut every N_CTX tokens, each first token BOS."""
    with Tokenizer(open_model("demo")) as tokenizer:
        ids = tokenizer.encode(golden_text(), add_special=True, parse_special=False)
        chunks = [ids[i * N_CTX : (i + 1) * N_CTX].copy() for i in range(N_CHUNKS)]
        for chunk in chunks:
            chunk[0] = tokenizer.bos_id
    return chunks


def weights_sha256(model: ModelFile) -> str:
    """Hash of names and bytes of all tensors: the figures do not depend on other metadata."""
    digest = hashlib.sha256()
    for info in model.tensors:
        digest.update(info.name.encode() + model.raw(info.name).tobytes())
    return digest.hexdigest()


def sample_imatrix(path: Path) -> dict[str, object]:
    """Count, sum over all columns, and every COLUMN_STEP-th column of each entry."""
    return {
        name: {
            "count": float(entry.counts[0]),
            "total": float(entry.sums.astype(np.float64).sum()),
            "columns": [float(f"{x:.8g}") for x in entry.sums[0, ::COLUMN_STEP]],
        }
        for name, entry in read_imatrix(path).entries.items()
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        golden = make(Path(sys.argv[1]), Path(scratch))
    Path(__file__).with_name("llama_cpp_demo.json").write_text(json.dumps(golden, indent=1) + "\n")
