"""Items per second in this process, against one request at a time to an HTTP server.

    python benchmarks/eval_speed.py --model demo --items 40

The server is llama-cpp-python's own (`pip install 'llama-cpp-python[server]'`), so both sides run
the same llama.cpp; another one that answers /v1/completions with echo and logprobs can be given by
--url. Requests are those that lm-eval's `gguf` model sends. Outputs and scores are compared too:
the server keeps the prefix of the last request as well, but computes with other kernels for single
rows, so log-likelihoods agree to about 1e-2 and an answer may differ where two tokens tie.

`over_pure_forward`: the whole time of scoring (texts to choices) over the time inside llama_decode
alone for exactly the tokens that shared prefixes leave, without the rows that we add to a batch.
Both are the best of some rounds, taken in turn; on a machine that others use too, its CPU time says
more. `--no-server` measures only this.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from bitwright.engine import decoder as decoder_module
from bitwright.engine.decoder import DecoderOptions
from bitwright.engine.lib import llama
from bitwright.engine.model_file import open_model
from bitwright.eval.generation import Prompt
from bitwright.eval.items import Item, builtin_items
from bitwright.eval.methods import tool_names
from bitwright.eval.scorer import Scorer

Timed = tuple[float, float, Sequence[object]]  # wall seconds, CPU seconds, results
PORT = 18080
MAX_TOKENS = 48


def main() -> None:
    """Print one table and, with --json, one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--items", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--url", default="")
    parser.add_argument("--no-server", action="store_true", help="only over_pure_forward")
    parser.add_argument("--rounds", type=int, default=3, help="of over_pure_forward")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    model = open_model(arguments.model, allow_requantize=True)
    items = [i for i in builtin_items("tool_calling", arguments.items, 5) if len(i.tools) > 1]
    with Scorer(model, DecoderOptions(threads=arguments.threads)) as scorer:
        choices, prompts = requests_of(scorer, items)
        speed = over_pure_forward(scorer, choices, arguments.rounds)
        if arguments.no_server:
            show({"multiple choice": speed}, as_json=arguments.json)
            return
        scorer.decoder.clear()
        own: list[Timed] = [
            timed(lambda: own_choices(scorer, choices)),
            timed(lambda: own_answers(scorer, prompts)),
        ]
    with server(model.path, arguments) as (url, pid):
        other: list[Timed] = [
            timed(lambda: http_choices(url, choices), pid),
            timed(lambda: http_answers(url, prompts), pid),
        ]
    rows = {}
    for name, n, (own_s, own_cpu_s, own_out), (http_s, http_cpu_s, http_out) in zip(
        ("multiple choice", "generation"), (len(items), len(prompts)), own, other, strict=True
    ):
        rows[name] = {
            "in_process_items_per_s": n / own_s,
            "http_items_per_s": n / http_s,
            "speedup": http_s / own_s,
            "cpu_speedup": http_cpu_s / own_cpu_s,
            "same": agreement(own_out, http_out),
        }
    rows["multiple choice"] |= speed
    show(rows, as_json=arguments.json)


def show(rows: dict[str, dict[str, float]], *, as_json: bool) -> None:
    """One JSON line, or one line per kind of task."""
    if as_json:
        print(json.dumps(rows))
        return
    for name, row in rows.items():
        print(name, ", ".join(f"{key} {value:.4g}" for key, value in row.items()))


def requests_of(
    scorer: Scorer, items: Sequence[Item]
) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """(context, the offered names as continuations) of each item, and prompts to answer.

    The contexts are plain text: the server's text offsets skip special tokens, and lm-eval's
    `gguf` model then cannot find the continuation.
    """
    prompts = [scorer.prompt_text(item.messages, item.tools) for item in items]
    choices = []
    for item in items:
        offered = "\n".join(json.dumps(tool) for tool in item.tools)
        context = f"Tools:\n{offered}\nQuestion: {item.messages[-1]['content']}\nTool:"
        choices.append((context, [f" {name}" for name in tool_names(item)]))
    return choices, prompts


def own_choices(scorer: Scorer, choices: Sequence[tuple[str, list[str]]]) -> list[int]:
    """The index of the likeliest continuation of each item."""
    pairs = [scorer.encode_pair(context, name) for context, names in choices for name in names]
    scores = iter([score.logprob for score in scorer.score(pairs)])
    return [_best([next(scores) for _ in names]) for _, names in choices]


def over_pure_forward(
    scorer: Scorer, choices: Sequence[tuple[str, list[str]]], rounds: int
) -> dict[str, float]:
    """Scoring's time over that of the forward passes it cannot do without."""
    own, forward = [], []
    for _ in range(rounds):
        scorer.decoder.clear()
        own.append(timed(lambda: own_choices(scorer, choices))[:2])
        forward.append(pure_forward(scorer, choices))
    (own_s, own_cpu_s), (forward_s, forward_cpu_s) = (
        tuple(map(min, zip(*measured, strict=True))) for measured in (own, forward)
    )
    pairs = [scorer.encode_pair(context, name) for context, names in choices for name in names]
    inputs = [np.concatenate(pair)[:-1] for pair in pairs]
    return {
        "tokens": float(sum(map(len, inputs))),
        "tokens_left": float(tokens_left(inputs)),
        "seconds": own_s,
        "pure_forward_seconds": forward_s,
        "over_pure_forward": own_s / forward_s,
        "cpu_over_pure_forward": own_cpu_s / forward_cpu_s,
    }


def tokens_left(inputs: Sequence[NDArray[np.int32]]) -> int:
    """Tokens that have no equal prefix among the others: what must be decoded once."""
    ordered = sorted(tokens.tolist() for tokens in inputs)
    left = len(ordered[0]) if ordered else 0
    for before, after in pairwise(ordered):
        same = 0
        while same < min(len(before), len(after)) and before[same] == after[same]:
            same += 1
        left += len(after) - same
    return left


def pure_forward(scorer: Scorer, choices: Sequence[tuple[str, list[str]]]) -> tuple[float, float]:
    """Wall and CPU seconds inside llama.cpp for the tokens that shared prefixes leave, once each.

    No row is added to a batch, and nothing of the logits is read.
    """
    pairs = [scorer.encode_pair(context, name) for context, names in choices for name in names]
    inputs = {np.concatenate(pair)[:-1].tobytes(): len(pair[0]) - 1 for pair in pairs}
    ordered = sorted(inputs, key=lambda raw: np.frombuffer(raw, np.int32).tolist())
    elapsed_s = cpu_s = 0.0
    decode, wait = llama.llama_decode, llama.llama_synchronize

    def timed_call(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            nonlocal elapsed_s, cpu_s
            started, before_s = time.perf_counter(), time.process_time()
            result = call(*arguments)
            elapsed_s += time.perf_counter() - started
            cpu_s += time.process_time() - before_s
            return result

        return run

    scorer.decoder.clear()
    with (
        patch.multiple(decoder_module, MIN_ROWS=1, MIN_SLOT_ROWS=1),
        patch.multiple(llama, llama_decode=timed_call(decode), llama_synchronize=timed_call(wait)),
    ):
        before = scorer.decoder.counters.decoded
        for raw in ordered:
            for _ in scorer.decoder.rows(np.frombuffer(raw, np.int32), inputs[raw]):
                pass
    decoded = scorer.decoder.counters.decoded - before
    scorer.decoder.clear()
    if decoded < tokens_left([np.frombuffer(raw, np.int32) for raw in ordered]):
        raise AssertionError(f"only {decoded} tokens were decoded")
    return elapsed_s, cpu_s


def own_answers(scorer: Scorer, prompts: Sequence[str]) -> list[str]:
    """Greedy answers."""
    scorer.decoder.clear()
    asked = [Prompt(scorer.encode(text), MAX_TOKENS, special=False) for text in prompts]
    return [answer.text.strip() for answer in scorer.generate(asked)]


def http_choices(url: str, choices: Sequence[tuple[str, list[str]]]) -> list[int]:
    """The same through echo and logprobs, one request per continuation."""
    best = []
    for context, names in choices:
        scores = []
        for name in names:
            body = {"prompt": context + name, "max_tokens": 1, "echo": True, "logprobs": 10}
            found = ask(url, body)["logprobs"]
            first = next(i for i, at in enumerate(found["text_offset"]) if at >= len(context))
            scores.append(sum(found["token_logprobs"][first:-1]))
        best.append(_best(scores))
    return best


def http_answers(url: str, prompts: Sequence[str]) -> list[str]:
    """The same answers, one request after another."""
    found = [str(ask(url, {"prompt": p, "max_tokens": MAX_TOKENS})["text"]) for p in prompts]
    return [text.strip() for text in found]


def timed(work: Callable[[], Sequence[object]], pid: int | None = None) -> Timed:
    """Wall and CPU seconds of the work, with those of a server's process; and its results."""
    before, started = cpu_seconds(pid), time.perf_counter()
    done = work()
    return time.perf_counter() - started, cpu_seconds(pid) - before, done


def cpu_seconds(pid: int | None) -> float:
    """CPU time of this process and of another one (Linux)."""
    own, stat = time.process_time(), Path(f"/proc/{pid}/stat")
    if pid is None or not stat.exists():
        return own
    user, system = stat.read_text().rpartition(")")[2].split()[11:13]
    return own + (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The first choice of a completion."""
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps({"temperature": 0.0, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        choice: dict[str, Any] = json.load(reply)["choices"][0]
    return choice


@contextmanager
def server(path: Path, arguments: argparse.Namespace) -> Iterator[tuple[str, int | None]]:
    """A running server's address: the given one, or llama-cpp-python's until the block ends."""
    if arguments.url:
        yield arguments.url, None
        return
    command = [sys.executable, "-m", "llama_cpp.server", "--model", str(path)]
    command += ["--port", str(PORT), "--n_threads", str(arguments.threads), "--n_ctx", "512"]
    command += ["--n_threads_batch", str(arguments.threads), "--logits_all", "true"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{PORT}"
    try:
        for _ in range(240):
            try:
                with urllib.request.urlopen(f"{url}/v1/models", timeout=5):
                    break
            except (urllib.error.URLError, ConnectionError):
                if process.poll() is not None:
                    sys.exit("no server: pip install 'llama-cpp-python[server]', or give --url")
                time.sleep(0.25)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(30)


def agreement(own: Sequence[object], other: Sequence[object]) -> float:
    """Share of equal results."""
    same = [a == b for a, b in zip(own, other, strict=True)]
    return sum(same) / max(1, len(same))


def _best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=lambda i: scores[i])


if __name__ == "__main__":
    main()
