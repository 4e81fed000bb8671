"""A small transformer as today's are: RMSNorm, grouped-query attention with RoPE, SwiGLU, tied embeddings.

Attention is a function that the caller gives, so that training runs over torch's and evaluation over a quantized cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from kvgen.accuracy.recipe import Shape

Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q [batch, tokens, q_heads, head_dim], k and v [batch, tokens, kv_heads, head_dim]) to the output, shaped like q."""


class Layer(nn.Module):
    """Attention and feed-forward network, each after a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = (shape.q_heads, shape.kv_heads, shape.kv_heads)
        self.head_dim = shape.head_dim
        self.attention_norm = nn.RMSNorm(shape.width)
        self.projections = [nn.Linear(shape.width, heads * shape.head_dim, bias=False) for heads in self.heads]
        self.qkv = nn.ModuleList(self.projections)
        self.out = nn.Linear(shape.q_heads * shape.head_dim, shape.width, bias=False)
        self.feed_norm = nn.RMSNorm(shape.width)
        self.gate, self.up = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        """x [batch, tokens, width]; `rotation` complex [tokens, head_dim / 2]; `attend` takes q, k and v."""
        normed = self.attention_norm(x)
        shapes = ((heads, self.head_dim) for heads in self.heads)
        q, k, v = (project(normed).unflatten(-1, shape) for project, shape in zip(self.projections, shapes, strict=True))
        x = x + self.out(attend(rotated(q, rotation), rotated(k, rotation), v).flatten(-2))
        normed = self.feed_norm(x)
        fed: torch.Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + fed


class Transformer(nn.Module):
    """A decoder over token numbers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = [Layer(shape) for _ in range(shape.layers)]
        self.layers = nn.ModuleList(self.blocks)
        self.norm = nn.RMSNorm(shape.width)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02 if "embedding" in name else weight.shape[1] ** -0.5)

    def forward(self, tokens: torch.Tensor, attend: Attention, start: int = 0) -> torch.Tensor:
        """Logits, float32 [batch, tokens, vocabulary], of tokens [batch, tokens] at the positions from `start` on."""
        return F.linear(self.hidden(tokens, attend, start), self.embedding.weight).float()

    def hidden(self, tokens: torch.Tensor, attend: Attention, start: int = 0) -> torch.Tensor:
        """The last layer's output, normed: [batch, tokens, width]."""
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        rotation = rotations(self.shape, positions)
        x = self.embedding(tokens)
        for index, layer in enumerate(self.blocks):
            x = layer(x, rotation, lambda q, k, v, index=index: attend(index, q, k, v))
        normed: torch.Tensor = self.norm(x)
        return normed


def rotations(shape: Shape, positions: torch.Tensor) -> torch.Tensor:
    """RoPE's rotations: complex64 [tokens, head_dim / 2]."""
    half = shape.head_dim // 2
    speed = shape.rope_base ** (-torch.arange(half, device=positions.device, dtype=torch.float64) / half)
    angle = positions.double().unsqueeze(1) * speed
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)


def rotated(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """x [batch, tokens, heads, head_dim] with channels c and c + head_dim / 2 rotated together."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = rotation.real.unsqueeze(1).to(x.dtype), rotation.imag.unsqueeze(1).to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def causal(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention over the tokens themselves, by torch."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    share = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(share, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
