"""How the cost of a damage map grows: `python benchmarks/damage_growth.py [--json]`.

Maps of generated llama models (random weights, random tokens) by exact partial passes, one size
changed at a time. CPU seconds of this process, so other load counts little. For each size:

probes        tensors × chunks
map_s         the whole map: references, cuts, probes, scores, ledger
probe_ms      map_s per probe
full_ms       one whole pass with its score, for comparison

and ``exponent``: the slope of log map_s over log size, which is about 1 for tokens and
vocabulary, 2 for layers (twice the tensors, each behind twice the depth), 1 for categories.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bitwright.corpora.records import Chunk
from bitwright.damage.kld import make_reference, score
from bitwright.damage.ledger import Ledger
from bitwright.damage.probe import measure_damage, suffix_forward
from bitwright.engine.model_file import open_model
from bitwright.engine.packing import Packer
from bitwright.engine.session import Session, SessionOptions
from bitwright.engine.suffix import SuffixRunner
from tests.tiny import tiny_gguf

BASE = {"n_layer": 4, "n_tokens": 128, "n_vocab": 2048, "n_chunks": 1}
SIZES: Mapping[str, tuple[int, ...]] = {
    "n_layer": (2, 4, 8),
    "n_tokens": (64, 128, 256),
    "n_vocab": (2048, 8192, 32768),
    "n_chunks": (1, 2, 4),
}


def made_chunk(index: int, n_tokens: int, n_vocab: int) -> Chunk:
    rng = np.random.default_rng(index)
    tokens = rng.integers(0, n_vocab, n_tokens).astype(np.int32)
    kinds = np.full(n_tokens, 2, np.uint8)
    return Chunk("code", "probe", index, tokens, (0,), (f"d{index}",), kinds)


def measure(sizes: Mapping[str, int], folder: Path) -> dict[str, float]:
    name = "-".join(map(str, sizes.values()))
    path = tiny_gguf(folder / f"{name}.gguf", n_layer=sizes["n_layer"], n_vocab=sizes["n_vocab"])
    options = SessionOptions(threads=1, n_ctx=sizes["n_tokens"], working_type="file")
    chunks = [made_chunk(i, sizes["n_tokens"], sizes["n_vocab"]) for i in range(sizes["n_chunks"])]
    with Session(open_model(path), options) as session, SuffixRunner(session) as runner:
        packer = Packer(session.model, None, cache_dir=folder / "packed")
        for tensor in session.weights:
            packer.pack(tensor, "Q2_K")
        # A ledger of its own: a size that two axes share is to be measured twice.
        with Ledger(folder / f"{time.monotonic_ns()}.sqlite", "k") as ledger:
            started = time.process_time()
            measure_damage(
                session, packer, {"code": chunks}, ledger, open_chunk=suffix_forward(runner)
            )
            map_s = time.process_time() - started
        probes = len(session.weights) * len(chunks)
        return {
            **sizes,
            "probes": probes,
            "map_s": map_s,
            "probe_ms": 1e3 * map_s / probes,
            "full_ms": 1e3 * full_seconds(session, chunks[0]),
        }


def full_seconds(session: Session, chunk: Chunk) -> float:
    batch = (chunk.tokens, chunk.starts, chunk.rows())
    reference = make_reference(session.logits(*batch), chunk.targets())
    started = time.process_time()
    score(reference, session.logits(*batch), chunk.targets())
    return time.process_time() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line")
    arguments = parser.parse_args()
    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="bitwright-bench-") as name:
        for axis, values in SIZES.items():
            rows = [measure({**BASE, axis: value}, Path(name)) for value in values]
            slope = np.polyfit(np.log(values), np.log([row["map_s"] for row in rows]), 1)[0]
            result[axis] = {"exponent": round(float(slope), 2), "sizes": rows}
    print(json.dumps(result, indent=None if arguments.json else 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
