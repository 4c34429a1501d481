"""What a damage map costs: `python benchmarks/damage_map.py MODEL [--llama-bin DIR] [--json]`.

Five ways to the same map, on the same tokens of the code corpus, all measured in this run. With
--json one line goes to stdout, with the keys of the contract; without it, everything measured.

full_s             every tensor swapped in process, whole passes, on the base chunk
suffix_s           the same by exact partial passes
suffix_strided_s   partial passes, every --stride-th row
racing_s           racing on all the text (--truth base chunks) until the layout is stable
naive_s            llama-quantize and llama-perplexity per tensor, from a sample of tensors
max_abs_delta_kld_nats   full against suffix, over tensors and groups of rows
spearman_racing    racing's damages against those of all rows of all the text
python_share       of suffix_s: neither llama.cpp, nor KLD, nor writing weights
kld_share          of suffix_s: scoring logits
peak_rss_over_model_bytes   of the whole run

Corpus, imatrix, packing and packing errors are prepared before and are in no figure but naive_s,
whose tools cannot share them; `prepared_s` says what they took.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.damage_bench import (
    Bench,
    Timed,
    common_values,
    joint_kld,
    layout_of,
    max_difference,
    open_bench,
    time_callbacks,
    time_score,
)
from benchmarks.naive_map import naive_seconds
from bitwright.allocator.race_map import (
    Decider,
    MapSettings,
    MeasuredMap,
    measure_fixed,
    measure_racing,
)
from bitwright.allocator.racing import RaceLimits
from bitwright.damage.damage_map import DamageMap
from bitwright.damage.forward import thinned
from bitwright.damage.probe import full_forward, probed_tensors, suffix_forward
from bitwright.engine.suffix import SuffixRunner

CONTRACT = (
    *("full_s", "suffix_s", "suffix_strided_s", "racing_s", "max_abs_delta_kld_nats", "naive_s"),
    *("spearman_racing", "python_share", "kld_share", "peak_rss_over_model_bytes"),
)
QUICK = {"tokens": 256, "truth": 8, "select": 3}


def timed(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """Wall seconds, CPU seconds, result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    ranks = [np.argsort(np.argsort(x)).astype(float) for x in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bitwright-bench-")))
        bench = stack.enter_context(open_bench(arguments, folder))
        runner = stack.enter_context(SuffixRunner(bench.session))
        figures: dict[str, Any] = {
            "model": bench.model.name,
            "working_type": bench.session.working_type,
            "tensors": len(bench.tensors),
            "tensors_of_model": len(probed_tensors(bench.session)),
            "tokens_base": sum(len(c.tokens) for c in bench.base),
            "tokens_all": sum(len(c.tokens) for c in bench.chunks),
            "prepared_s": bench.prepared_s,
        }
        maps = measure_all(bench, runner, arguments, figures)
        judge(bench, maps, figures)
        figures["peak_rss_over_model_bytes"] = peak_rss_bytes() - bench.model.size_bytes
        figures["naive_s"] = None
        if arguments.llama_bin:
            figures.update(naive_seconds(bench, arguments, folder))
        figures["speed_up"] = speed_ups(figures)
        return figures


def measure_all(
    bench: Bench, runner: SuffixRunner, arguments: argparse.Namespace, figures: dict[str, Any]
) -> dict[str, DamageMap]:
    """Each way on a ledger of its own."""
    whole, partial = full_forward, suffix_forward(runner)
    names = tuple(bench.tensors)
    plain = MapSettings(second=False, tensors=names)
    racing = replace(plain, stride=arguments.stride, limits=RaceLimits())
    target = arguments.target

    def fixed(label: str, chunks: Sequence[Any], forward: Any) -> MeasuredMap:
        return measure_fixed(bench.probing(label, forward), {target: chunks}, plain, None)

    def race() -> MeasuredMap:
        decider = Decider(bench.options, lambda _: bench.errors, target, bench.room)
        return measure_racing(
            bench.probing("racing", partial), {target: bench.chunks}, racing, decider
        )

    strided = [thinned(c, arguments.stride) for c in bench.base]
    ways: dict[str, Callable[[], MeasuredMap]] = {
        "full": lambda: fixed("full", bench.base, whole),
        "suffix": lambda: fixed("suffix", bench.base, partial),
        "suffix_strided": lambda: fixed("suffix_strided", strided, partial),
        "racing": race,
        "truth": lambda: fixed("truth", bench.chunks, partial),
    }
    maps: dict[str, DamageMap] = {}
    for label, way in ways.items():
        watch = Timed(bench.session, runner) if label == "suffix" else None
        wall, cpu, found = timed(way)
        print(f"{label}: {wall:.1f} s, {cpu:.1f} s of CPU, {found.tokens} tokens", file=sys.stderr)
        figures[f"{label}_s"], figures[f"{label}_cpu_s"] = wall, cpu
        figures[f"{label}_tokens"] = found.tokens
        maps[label] = found.damage_map
        if watch is not None:
            watch.stop()
            figures.update(shares(bench, runner, watch))
        if found.race is not None:
            figures["racing_rounds"] = found.race.rounds
            figures["racing_stable"] = found.race.stable
            figures["racing_undecided"] = len(found.race.undecided)
            figures["racing_possible_loss"] = found.race.possible_loss / found.race.predicted
    figures["max_abs_delta_kld_nats"] = max_difference(bench, "full", "suffix")
    return maps


def shares(bench: Bench, runner: SuffixRunner, watch: Timed) -> dict[str, float]:
    """KLD's and Python's parts of the suffix figure; callbacks run inside llama.cpp's time.

    Python's in CPU seconds of the main thread, so that other load on the machine does not count as
    ours; KLD's, which is spread over threads, on the clock.
    """
    kld_cpu_s, kld_wall_s = (x * watch.passes for x in time_score(bench, bench.base[0]))
    callbacks_s = time_callbacks(bench, runner) * watch.passes
    python_s = watch.total_s - watch.decode_s - watch.swap_s - kld_cpu_s + callbacks_s
    return {
        "kld_share": kld_wall_s / watch.wall_s,
        "python_share": max(0.0, python_s) / watch.total_s,
    }


def judge(bench: Bench, maps: dict[str, DamageMap], figures: dict[str, Any]) -> None:
    """Each map against the one of all the text, and the whole layouts that they lead to."""
    layouts = {label: layout_of(bench, found) for label, found in maps.items()}
    joint: dict[tuple[tuple[str, str], ...], float] = {}
    for label, layout in layouts.items():
        mine, truth = common_values(maps[label], maps["truth"])
        figures[f"spearman_{label}"] = spearman(mine, truth)
        good = (mine > 0) & (truth > 0)
        figures[f"log_sd_{label}"] = float(np.std(np.log(mine[good] / truth[good])))
        key = tuple(sorted(layout.items()))
        if key not in joint:
            joint[key] = joint_kld(bench, layout)
        figures[f"layout_kld_{label}"] = joint[key]
        different = sum(layouts["truth"][n] != t for n, t in layout.items())
        figures[f"layout_differs_{label}"] = different
    figures["racing_layout_excess"] = figures["layout_kld_racing"] / figures["layout_kld_truth"] - 1


def speed_ups(figures: dict[str, Any]) -> dict[str, float]:
    """The ratios that the goals are about."""
    found = {
        "suffix_over_full": figures["full_s"] / figures["suffix_s"],
        "strided_over_full": figures["full_s"] / figures["suffix_strided_s"],
        "suffix_over_full_cpu": figures["full_cpu_s"] / figures["suffix_cpu_s"],
        "strided_over_full_cpu": figures["full_cpu_s"] / figures["suffix_strided_cpu_s"],
        "racing_tokens_of_truth": figures["racing_tokens"] / figures["truth_tokens"],
        "racing_over_truth": figures["truth_s"] / figures["racing_s"],
    }
    if figures["naive_s"] is not None:
        found["racing_over_naive"] = figures["naive_s"] / figures["racing_s"]
        found["racing_over_naive_all_text"] = figures["naive_all_text_s"] / figures["racing_s"]
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF file, or 'demo'")
    parser.add_argument("--llama-bin", type=Path, help="folder of llama-quantize, llama-perplexity")
    parser.add_argument("--quick", action="store_true", help="less text, within 3 minutes")
    parser.add_argument("--json", action="store_true", help="one line with the contract's keys")
    parser.add_argument("--tokens", type=int, help="tokens of a chunk (512; quick: 256)")
    parser.add_argument("--truth", type=int, help="chunks of the yardstick (16; quick: 8)")
    parser.add_argument("--select", type=int, help="chunks for whole layouts (8; quick: 3)")
    parser.add_argument("--stride", type=int, default=4)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--working-type", default="auto")
    parser.add_argument("--target", default="code", help="corpus recipe and category")
    parser.add_argument("--budget", default="Q3_K_S + 0.12 %")
    parser.add_argument("--sample", type=int, help="only so many tensors, evenly in graph order")
    parser.add_argument("--naive-tensors", type=int, default=3, help="sample for naive_s")
    arguments = parser.parse_args()
    usual = {"tokens": 512, "truth": 16, "select": 8} | (QUICK if arguments.quick else {})
    for name, value in usual.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def main() -> int:
    arguments = parse()
    figures = run(arguments)
    if arguments.json:
        print(json.dumps({key: figures[key] for key in CONTRACT}, allow_nan=False))
        print(json.dumps(figures, indent=1), file=sys.stderr)
    else:
        print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
