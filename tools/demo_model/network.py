"""The demo model in PyTorch: a small ``llama`` decoder whose rows are all multiples of 256.

So every K and IQ type of llama.cpp applies to every matrix without a fallback.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the network."""

    n_vocab: int = 2048
    n_embd: int = 256
    n_layer: int = 5
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 768
    n_ctx: int = 512
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.n_embd // self.n_head


class Norm(nn.Module):  # type: ignore[misc]
    """RMS norm with a learnt scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x (..., size)."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Block(nn.Module):  # type: ignore[misc]
    """Grouped-query attention and a SwiGLU feed-forward, each with its norm and residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, kv = shape.n_embd, shape.n_head_kv * shape.head_size
        self.shape = shape
        self.attn_norm = Norm(width, shape.norm_eps)
        self.attn_q, self.attn_k = _linear(width, width), _linear(width, kv)
        self.attn_v, self.attn_output = _linear(width, kv), _linear(width, width)
        self.ffn_norm = Norm(width, shape.norm_eps)
        self.ffn_gate, self.ffn_up = _linear(width, shape.n_ff), _linear(width, shape.n_ff)
        self.ffn_down = _linear(shape.n_ff, width)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """x (batch, tokens, width); ``turn``: cosines and sines; ``mask`` None = causal."""
        x = x + self.attn_output(self._attention(self.attn_norm(x), turn, mask))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))

    def _attention(self, h: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        q, k, v = (self._heads(layer(h)) for layer in (self.attn_q, self.attn_k, self.attn_v))
        q, k = rotate(q, turn).to(v.dtype), rotate(k, turn).to(v.dtype)
        groups = self.shape.n_head // self.shape.n_head_kv
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return out.transpose(1, 2).flatten(2)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.shape.head_size)).transpose(1, 2)


class DemoModel(nn.Module):  # type: ignore[misc]
    """Token embedding (also the output matrix), blocks, final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.n_vocab, shape.n_embd)
        self.blk = nn.ModuleList(Block(shape) for _ in range(shape.n_layer))
        self.output_norm = Norm(shape.n_embd, shape.norm_eps)
        cosines, sines = rotation_tables(shape)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=initial_spread(name, weight.shape[1], shape.n_layer))

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits (batch, tokens, n_vocab) of ids (batch, tokens)."""
        n = ids.shape[1]
        x = self.token_embd(ids)
        for block in self.blk:
            x = block(x, (self.cosines[:n], self.sines[:n]), mask)
        return F.linear(self.output_norm(x), self.token_embd.weight)


def initial_spread(name: str, n_inputs: int, n_layer: int) -> float:
    """Standard deviation at the start; what writes into the residual stream starts smaller."""
    if name.startswith("token_embd"):
        return 0.02
    spread = 0.5 / math.sqrt(n_inputs)
    writes = name.endswith(("attn_output.weight", "ffn_down.weight"))
    return spread / math.sqrt(2 * n_layer) if writes else spread


def rotation_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, each (n_ctx, head_size / 2)."""
    powers = torch.arange(0, shape.head_size, 2).float() / shape.head_size
    angles = torch.outer(torch.arange(shape.n_ctx).float(), shape.rope_base**-powers)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding on adjacent pairs, as llama.cpp's ``llama`` architecture has it."""
    cosines, sines = turn
    even, odd = x[..., 0::2], x[..., 1::2]
    pairs = torch.stack((even * cosines - odd * sines, even * sines + odd * cosines), -1)
    return pairs.flatten(-2)


def _linear(n_inputs: int, n_outputs: int) -> nn.Linear:
    return nn.Linear(n_inputs, n_outputs, bias=False)
