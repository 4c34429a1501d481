"""Train the demo model on a CPU: ``python -m tools.demo_model.train --minutes 60 --out run``.

Everything it learns from is generated or read from the running Python's standard library. The
rate follows the training clock, so any time budget works. A checkpoint is written every five
minutes, when interrupted and at the end; the same command goes on from it.
"""

import argparse
import json
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.demo_model.batches import Batches, Rows
from tools.demo_model.generators import GENERATORS
from tools.demo_model.network import DemoModel, Shape
from tools.demo_model.optimizers import make_optimizers, rate_factor
from tools.demo_model.vocabulary import load_tokenizer, train_tokenizer

SAVE_EVERY_S = 300.0
REPORT_EVERY = 25  # steps
CONVERSATION_ROWS, CONVERSATION_LENGTH = 6, 384
TEXT_ROWS, TEXT_LENGTH = 1, 512
SHARES = {"tool": 0.35, "math": 0.35, "chat": 0.30}  # of the conversations, by number
UNMASKED = 0.25  # share of steps whose conversations see the ones before them in the row


@dataclass(slots=True)
class Clock:
    """How far training is; ``seconds`` counts training alone, over all resumed runs."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    log: list[dict[str, float]] = field(default_factory=list)


@dataclass(slots=True)
class Trainer:
    """Everything that a checkpoint restores, and the stream of batches."""

    model: DemoModel
    optimizers: list[torch.optim.Optimizer]
    batches: Batches
    clock: Clock
    path: Path

    def step(self, progress: float) -> float:
        """One update; returns the weighted loss per token in nats."""
        factor = rate_factor(progress, self.clock.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor
            optimizer.zero_grad(set_to_none=True)
        parts = draw(self.batches)
        total = sum(float(rows.weights.sum()) for rows in parts)
        loss = 0.0
        for rows in parts:
            part = weighted_loss(self.model, rows) / total
            part.backward()
            loss += float(part.detach())
            self.clock.tokens += rows.weights.size
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.clock.step += 1
        return loss

    def save(self) -> None:
        """Write the checkpoint beside the old one, then take its place."""
        temporary = self.path.with_suffix(".tmp")
        state = {
            "model": self.model.state_dict(),
            "shape": asdict(self.model.shape),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "clock": asdict(self.clock),
        }
        torch.save(state, temporary)
        temporary.replace(self.path)

    def measure(self) -> None:
        """Add the held-out losses to the log, print them and save."""
        entry = {
            "step": self.clock.step,
            "minutes": round(self.clock.seconds / 60, 1),
            "tokens": self.clock.tokens,
            **validate(self.model, self.batches),
        }
        self.clock.log.append(entry)
        print(json.dumps(entry), flush=True)
        self.save()


def draw(batches: Batches) -> list[Rows]:
    """The batches of one step: conversations, and a row of code or prose."""
    if batches.rng.random() < UNMASKED:
        # Longer rows without a mask teach the positions up to the whole context.
        n_rows = CONVERSATION_ROWS * CONVERSATION_LENGTH // TEXT_LENGTH
        packed = batches.conversation_rows(n_rows, TEXT_LENGTH, SHARES)
        talk = Rows(packed.ids, packed.weights, None)
    else:
        talk = batches.conversation_rows(CONVERSATION_ROWS, CONVERSATION_LENGTH, SHARES)
    return [talk, batches.text_rows(TEXT_ROWS, TEXT_LENGTH)]


def weighted_loss(model: DemoModel, rows: Rows) -> Tensor:
    """Sum over tokens of weight · negative log-likelihood."""
    ids, weights = torch.from_numpy(rows.ids), torch.from_numpy(rows.weights)
    mask = None if rows.documents is None else document_mask(torch.from_numpy(rows.documents))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids[:, :-1], mask)
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    ).view_as(weights)
    return (losses * weights).sum()


def document_mask(documents: Tensor) -> Tensor:
    """(rows, 1, n, n) boolean: a token sees earlier tokens of its own document."""
    n = documents.shape[1]
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & causal)[:, None]


def validate(model: DemoModel, training: Batches, items: int = 48) -> dict[str, float]:
    """Held-out nats per token of code and of each kind's answers; share of answers all right."""
    batches = Batches(training.tokenizer, np.random.default_rng(12345), heldout=True)
    out: dict[str, float] = {}
    with torch.no_grad():
        rows = batches.text_rows(12, TEXT_LENGTH, prose_share=0.0)
        loss = float(weighted_loss(model, rows)) / float(rows.weights.sum())
        out["code_nll"] = round(loss, 3)
        for kind in GENERATORS:
            out |= _answers(model, batches, kind, items)
    return out


def _answers(model: DemoModel, batches: Batches, kind: str, items: int) -> dict[str, float]:
    total, n_tokens, right = 0.0, 0, 0
    for _ in range(items):
        ids, weights = batches.conversation(kind)
        if len(ids) > TEXT_LENGTH + 1:
            continue
        tokens, answer = torch.tensor([ids]), torch.tensor(weights[1:]) == 1.0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])[0].float()
        losses = F.cross_entropy(logits, tokens[0, 1:], reduction="none")
        total, n_tokens = total + float(losses[answer].sum()), n_tokens + int(answer.sum())
        right += bool((logits.argmax(-1) == tokens[0, 1:])[answer].all())
    return {
        f"{kind}_nll": round(total / max(1, n_tokens), 3),
        f"{kind}_exact": round(right / items, 3),
    }


def make_trainer(out: Path, seed: int, shape: Shape) -> Trainer:
    """A new trainer, or the one that the checkpoint in ``out`` holds."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer_path, path = out / "tokenizer.json", out / "checkpoint.pt"
    if not tokenizer_path.exists():
        train_tokenizer(shape.n_vocab, seed).save(str(tokenizer_path))
    torch.manual_seed(seed)
    model = DemoModel(shape)
    optimizers, clock = make_optimizers(model), Clock()
    if path.exists():
        saved: dict[str, Any] = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        clock = Clock(**saved["clock"])
        print(f"resumed at step {clock.step}", flush=True)
    rng = np.random.default_rng([seed, clock.step])
    return Trainer(model, optimizers, Batches(load_tokenizer(tokenizer_path), rng), clock, path)


def train(trainer: Trainer, budget_s: float) -> None:
    """Train until the clock reaches the budget, or SIGINT or SIGTERM comes."""
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _frame: stopped.append(got))
    clock, saved_s = trainer.clock, trainer.clock.seconds
    last, running = time.monotonic(), None
    while clock.seconds < budget_s and not stopped:
        loss = trainer.step(clock.seconds / budget_s)
        running = loss if running is None else 0.95 * running + 0.05 * loss
        now = time.monotonic()
        clock.seconds, last = clock.seconds + now - last, now
        if clock.step % REPORT_EVERY == 0:
            print(f"step {clock.step} {clock.seconds:.0f} s loss {running:.3f}", flush=True)
        if clock.seconds - saved_s > SAVE_EVERY_S:
            trainer.measure()
            saved_s, last = clock.seconds, time.monotonic()  # measuring is no training time
    if stopped:
        trainer.save()
    else:
        trainer.measure()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train Bitwright's demo model on the CPU.")
    parser.add_argument("--minutes", type=float, default=60.0, help="whole training time")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("run"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    train(make_trainer(given.out, given.seed, Shape()), 60.0 * given.minutes)


if __name__ == "__main__":
    main()
