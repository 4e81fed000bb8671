"""Seeded inputs: plain normal ones, and structured ones that break kernels which only ever saw the normal."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvgen.format.dtypes import torch_dtype
from kvgen.spec import KernelSpec

LOGIT = 60.0


@dataclass(frozen=True)
class Inputs:
    """q [batch, q_len, q_heads, head_dim], k and v [batch, kv_len, kv_heads, head_dim], in the spec's dtype, on the CPU."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def normal(spec: KernelSpec, batch: int, kv_len: int, *, q_len: int = 1, seed: int = 0) -> Inputs:
    """Standard normal everywhere."""
    random = torch.Generator().manual_seed(seed)
    dtype = torch_dtype(spec.attention.dtype)
    return Inputs(*(torch.randn(shape, generator=random).to(dtype) for shape in _shapes(spec, batch, kv_len, q_len)))


def structured(spec: KernelSpec, batch: int, kv_len: int, *, q_len: int = 1, seed: int = 0) -> Inputs:
    """Difficult properties of real caches in one data set.

    K has a few channels of large magnitude and offset, one channel that is constant, and one huge value; the first tokens
    attract attention (sinks); a few needles far back answer the queries; V has a constant token and an outlier channel.
    The largest |score| of q with 1 / sqrt(head_dim) is about LOGIT.
    """
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=random) for shape in _shapes(spec, batch, kv_len, q_len))
    heads, dim = spec.attention.kv_heads, spec.attention.head_dim
    outliers = torch.randperm(dim, generator=random)[: max(2, dim // 32)]
    k[..., outliers[1:]] = k[..., outliers[1:]] * 4 + 8
    v[..., outliers[:1]] *= 8
    v[:, kv_len // 2] = -0.75  # a constant group
    toward = q.mean(1).reshape(batch, heads, -1, dim).mean(2)  # [batch, heads, dim]
    toward = toward / toward.norm(dim=-1, keepdim=True)
    needles = torch.randint(kv_len, (max(1, kv_len // 512),), generator=random)
    k[:, needles] += 6 * toward.unsqueeze(1)
    k[:, : min(4, kv_len)] += 8 * toward.unsqueeze(1)
    v[:, : min(4, kv_len)] *= 0.05
    k[:, kv_len * 3 // 4, :, int(outliers[-1])] = 60.0  # one huge value spoils its group
    k[..., int(outliers[0])] = 1.5  # constant groups
    q = q * (LOGIT / _largest_score(q, k))
    dtype = torch_dtype(spec.attention.dtype)
    return Inputs(q.to(dtype), k.to(dtype), v.to(dtype))


def learned_sinks(spec: KernelSpec, device: torch.device | str = "cpu") -> torch.Tensor | None:
    """Sink logits of a spec that has them, float32 [q_heads]: from far below to above the LSE of some thousand tokens. Else None."""
    return torch.linspace(-2.0, 8.0, spec.attention.q_heads, device=device) if spec.attention.sinks else None


def _shapes(spec: KernelSpec, batch: int, kv_len: int, q_len: int) -> list[tuple[int, int, int, int]]:
    att = spec.attention
    return [(batch, q_len, att.q_heads, att.head_dim), *[(batch, kv_len, att.kv_heads, att.head_dim)] * 2]


def _largest_score(q: torch.Tensor, k: torch.Tensor) -> float:
    """Largest |q . k| / sqrt(head_dim)."""
    share = q.shape[2] // k.shape[2]
    largest = 0.0
    for head in range(k.shape[2]):
        queries = q[:, :, head * share : (head + 1) * share].flatten(1, 2)
        largest = max(largest, float((queries @ k[:, :, head].transpose(1, 2)).abs().max()))
    return max(largest, 1e-6) / math.sqrt(q.shape[-1])
