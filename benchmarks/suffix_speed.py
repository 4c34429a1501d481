"""Time of partial passes against full ones: `python benchmarks/suffix_speed.py MODEL [--json]`.

CPU seconds of this process per pass, so other load on the machine counts little. Tokens are
random: their values do not change the work. Weights are sampled evenly in graph order. Prints
one JSON line:

full_s, suffix_s       one pass with one weight swapped, mean over the sampled weights
advance_s              keeping the cut: per weight, all weights walked in graph order
swap_s                 writing a packed weight and restoring it, per weight
ratio                  full_s / (suffix_s + advance_s)
ratio_by_third         the same for the first, middle and last third of the weights
fixed_s                a partial pass in which no node runs: callbacks, batch, memory, logits copy
python_share           the callback's share of a partial pass, from its cost measured alone
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.engine.ggml_types import fallback_type, fits_row
from bitwright.engine.graph import COMPUTE, Plan
from bitwright.engine.model_file import open_model
from bitwright.engine.packing import Packer
from bitwright.engine.session import Session, SessionOptions
from bitwright.engine.suffix import Stream, SuffixRunner, strided

CALLBACK_REPEATS = 20


@dataclass(frozen=True, slots=True)
class Sample:
    """CPU seconds of one weight."""

    name: str
    full_s: float
    suffix_s: float
    swap_s: float
    equal: bool


def cpu_time(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = call()
    return time.process_time() - started, result


def measure_weight(
    stream: Stream, name: str, packer: Packer, probe_type: str, full_s: float | None
) -> Sample:
    """One weight both ways; with `full_s` known, only the partial pass."""
    session = stream.runner.session
    width = session.model.tensor(name).n_per_row
    kind = probe_type if fits_row(probe_type, width) else fallback_type(probe_type, width)
    packed = packer.pack(name, kind)
    stream.advance(name)
    set_s, _ = cpu_time(lambda: session.set_tensor(name, kind, packed))
    suffix_s, view = cpu_time(lambda: stream.logits(name))
    equal = True
    if full_s is None:
        partial = view.copy()
        full_s, view = cpu_time(lambda: session.logits(stream.tokens, stream.starts, stream.rows))
        equal = bool(np.array_equal(partial, view))
    restore_s, _ = cpu_time(lambda: session.restore(name))
    return Sample(name, full_s, suffix_s, set_s + restore_s, equal)


def advance_all(stream: Stream, names: tuple[str, ...]) -> float:
    return cpu_time(lambda: [stream.advance(name) for name in names])[0] / len(names)


def fixed_cost(stream: Stream) -> float:
    """A pass whose plan runs nothing."""
    tape = stream._recorded()
    nodes = tape.graph.nodes
    flags = tuple(node.flags & ~COMPUTE for node in nodes)
    plan = Plan(flags, (False,) * len(nodes), frozenset(), frozenset())
    return min(cpu_time(lambda: stream.runner.follow(stream, tape, plan, {}))[0] for _ in range(5))


def callback_cost(stream: Stream) -> float:
    """All callbacks of one pass, called through ctypes once more than llama.cpp would."""
    tape = stream._recorded()
    nodes = tape.graph.nodes
    flags = tuple(node.flags for node in nodes)
    plan = Plan(flags, (False,) * len(nodes), frozenset(), frozenset())
    watcher, callback = stream.runner._watcher, stream.runner._context._callback
    assert callback is not None

    def once() -> None:
        watcher.follow(tape, plan, {})
        for address in tape.addresses[:-1]:
            callback(address, True, None)
        watcher.finish()

    return min(cpu_time(once)[0] for _ in range(CALLBACK_REPEATS))


def thirds(samples: list[Sample], advance_s: float) -> list[float]:
    parts = np.array_split(np.arange(len(samples)), 3)
    return [
        round(
            float(np.mean([samples[i].full_s for i in part]))
            / (float(np.mean([samples[i].suffix_s for i in part])) + advance_s),
            3,
        )
        for part in parts
        if len(part)
    ]


def peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def run(arguments: argparse.Namespace) -> dict[str, object]:
    model = open_model(arguments.model)
    options = SessionOptions(threads=arguments.threads, n_ctx=arguments.tokens)
    with Session(model, options) as session, SuffixRunner(session) as runner:
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, session.n_vocab, arguments.tokens).astype(np.int32)
        rows: NDArray[np.int64] = strided(np.arange(arguments.tokens), arguments.stride)
        stream = runner.start(tokens, (0,), rows)
        stream.reference_logits()
        names = tuple(n for n in session.weights if model.tensor(n).n_rows >= 32)
        advance_s = advance_all(stream, names)
        stream = runner.start(tokens, (0,), rows)
        record_s, _ = cpu_time(stream.reference_logits)
        picked = np.unique(np.linspace(0, len(names) - 1, arguments.weights).round().astype(int))
        packer = Packer(model, None)
        full_s: float | None = None
        samples: list[Sample] = []
        for number, i in enumerate(picked):
            # Full passes cost the same for every weight: a few are enough, spread over the depth.
            known = full_s if number % arguments.full_every else None
            samples.append(measure_weight(stream, names[i], packer, arguments.type, known))
            full_s = samples[-1].full_s
        callback_s, fixed_s = callback_cost(stream), fixed_cost(stream)
        suffix_s = float(np.mean([s.suffix_s for s in samples]))
        full_mean = float(np.mean([s.full_s for s in samples]))
        return {
            "model": model.name,
            "working_type": session.working_type,
            "tokens": arguments.tokens,
            "rows": len(rows),
            "weights": len(names),
            "sampled": len(samples),
            "full_s": full_mean,
            "record_s": record_s,
            "suffix_s": suffix_s,
            "advance_s": advance_s,
            "swap_s": float(np.mean([s.swap_s for s in samples])),
            "ratio": full_mean / (suffix_s + advance_s),
            "ratio_by_third": thirds(samples, advance_s),
            "fixed_s": fixed_s,
            "python_share": callback_s / suffix_s,
            "peak_rss_over_model_bytes": peak_rss_bytes() - model.path.stat().st_size,
            "bit_equal": all(s.equal for s in samples),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF file, or 'demo'")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--stride", type=int, default=4, help="every n-th row is scored")
    parser.add_argument("--weights", type=int, default=24, help="how many weights to sample")
    parser.add_argument("--full-every", type=int, default=4, help="full pass for every n-th weight")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--type", default="Q4_0", help="type that weights are swapped to")
    parser.add_argument("--json", action="store_true", help="one line (the default is indented)")
    arguments = parser.parse_args()
    print(json.dumps(run(arguments), indent=None if arguments.json else 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
