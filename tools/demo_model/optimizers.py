"""Muon for the hidden matrices, AdamW for the embedding and the norms, and the rate schedule."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tools.demo_model.network import DemoModel

WARM_UP_STEPS = 50
DECAY_SHARE = 0.35  # of the training time, at its end
MUON_RATE = 0.02
ADAM_RATE = 3e-3

# Newton-Schulz coefficients of Muon (Jordan et al. 2024): they take any singular value of a matrix
# with norm 1 to about 1 within five steps.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):  # type: ignore[misc]
    """Momentum whose update is made orthogonal; matrices of one shape are done together."""

    def __init__(self, weights: Iterable[Tensor], rate: float) -> None:
        super().__init__(list(weights), {"lr": rate, "momentum": 0.95, "weight_decay": 0.05})

    def step(self, closure: None = None) -> None:
        """One update of all matrices; their gradients must be there."""
        with torch.no_grad():
            for group in self.param_groups:
                self._step_group(group)

    def _step_group(self, group: dict[str, Any]) -> None:
        by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        for weight in group["params"]:
            state = self.state[weight]
            average = state.setdefault("momentum", torch.zeros_like(weight))
            average.lerp_(weight.grad, 1.0 - group["momentum"])
            nesterov = weight.grad.lerp(average, group["momentum"])
            by_shape.setdefault(tuple(weight.shape), []).append((weight, nesterov))
        for (n_rows, n_columns), items in by_shape.items():
            updates = orthogonal(torch.stack([update for _, update in items]))
            scale = max(1.0, n_rows / n_columns) ** 0.5
            for (weight, _), update in zip(items, updates, strict=True):
                weight.mul_(1.0 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * scale)


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """Nearly the closest (semi-)orthogonal matrix of each of (n, rows, columns)."""
    is_wide = matrices.shape[1] <= matrices.shape[2]
    wide = matrices if is_wide else matrices.transpose(1, 2)
    a, b, c = NEWTON_SCHULZ
    z = (wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(steps):
        square = z @ z.transpose(1, 2)
        z = a * z + (b * square + c * (square @ square)) @ z
    return z.float() if is_wide else z.float().transpose(1, 2)


def make_optimizers(model: DemoModel) -> list[torch.optim.Optimizer]:
    """Each group keeps its highest rate under "peak"."""
    named = list(model.named_parameters())
    hidden = [w for name, w in named if w.dim() == 2 and not name.startswith("token_embd")]
    norms = [w for _, w in named if w.dim() < 2]
    adam = torch.optim.AdamW(
        [
            {"params": [model.token_embd.weight], "weight_decay": 0.01},
            {"params": norms, "weight_decay": 0.0},
        ],
        lr=ADAM_RATE,
        betas=(0.9, 0.95),
    )
    optimizers = [Muon(hidden, MUON_RATE), adam]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def rate_factor(progress: float, step: int) -> float:
    """Share of the highest rate: linear warm-up, flat, linear decay to 0 at progress 1."""
    warm = min(1.0, (step + 1) / WARM_UP_STEPS)
    return warm * min(1.0, max(0.0, 1.0 - progress) / DECAY_SHARE)
