"""Attention in fp64 with every feature of the spec language, on the device of its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

MAX_SCORES = 1 << 23
"""Scores held at once: 64 MiB in fp64."""


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [batch, q_len, q_heads, head_dim] and LSE [batch, q_heads, q_len], both fp64; the LSE is a natural logarithm.

    q [batch, q_len, q_heads, head_dim] holds the queries of the last q_len positions; k and v [batch, tokens, kv_heads,
    head_dim]; `lengths` int [batch] counts the valid tokens (all, where None). Query i of a sequence of length n stands at
    position n - q_len + i and sees positions up to its own, with `window` only the last `window` of them. `scale` is
    1 / sqrt(head_dim) where None. `sinks` [q_heads] are logits that join the denominator only (after scale and softcap).
    A query that sees nothing gives 0, and LSE = its sink, or -inf.
    """
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float64, device=q.device)
    for part in _parts(q, k, lengths, scale, softcap, window, sinks):
        values = v[part.batch, part.first : part.weights.shape[-1], part.kv_head].double()
        out[part.batch, part.rows, part.heads] = (part.weights[..., part.first :] @ values).transpose(0, 1)
        lse[part.batch, part.heads, part.rows] = part.lse
    return out, lse


def weights(
    q: torch.Tensor,
    k: torch.Tensor,
    lengths: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention weights of positions: fp64 [batch, q_heads, q_len, tokens], 0 for positions that a query does not see."""
    held = torch.zeros(q.shape[0], q.shape[2], q.shape[1], k.shape[1], dtype=torch.float64, device=q.device)
    for part in _parts(q, k, lengths, scale, softcap, window, sinks):
        held[part.batch, part.heads, part.rows, : part.weights.shape[-1]] = part.weights
    return held


@dataclass(frozen=True)
class _Part:
    """Weights [heads, rows, length] and LSE [heads, rows] of some queries of one KV head."""

    batch: int
    kv_head: int
    heads: slice
    rows: slice
    first: int
    """The first position that one of the queries sees: values before it take no part, since 0 times a NaN is a NaN."""
    weights: torch.Tensor
    lse: torch.Tensor


def _parts(
    q: torch.Tensor,
    k: torch.Tensor,
    lengths: torch.Tensor | None,
    scale: float | None,
    softcap: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> Iterator[_Part]:
    """Every query once, in pieces of at most MAX_SCORES scores."""
    batch, q_len, q_heads, head_dim = q.shape
    kv_heads = k.shape[2]
    if q_heads % kv_heads:
        raise ValueError(f"q_heads ({q_heads}) must be a multiple of kv_heads ({kv_heads})")
    share = q_heads // kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    for b in range(batch):
        length = k.shape[1] if lengths is None else int(lengths[b])
        for h in range(kv_heads):
            heads = slice(h * share, (h + 1) * share)
            keys = k[b, :length, h].double()
            sink = None if sinks is None else sinks[heads].double()
            for rows in _row_chunks(q_len, share * max(length, 1)):
                queries = q[b, rows, heads].double().transpose(0, 1)  # [share, rows, head_dim]
                visible = _visible(length, q_len, rows, window).to(q.device)
                first = 0 if window is None else max(0, length - q_len + rows.start - window + 1)
                yield _Part(b, h, heads, rows, first, *_softmax(queries @ keys.T * scale, visible, softcap, sink))


def _row_chunks(q_len: int, scores_per_row: int) -> Iterator[slice]:
    step = max(1, MAX_SCORES // scores_per_row)
    return (slice(start, min(start + step, q_len)) for start in range(0, q_len, step))


def _visible(length: int, q_len: int, rows: slice, window: int | None) -> torch.Tensor:
    """bool [rows, length]."""
    query = torch.arange(rows.start, rows.stop).unsqueeze(1) + length - q_len
    key = torch.arange(length).unsqueeze(0)
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def _softmax(scores: torch.Tensor, visible: torch.Tensor, softcap: float, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [heads, rows, length] and LSE [heads, rows] of scores [heads, rows, length]."""
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.unsqueeze(1))
    shift = torch.where(lse == -torch.inf, 0.0, lse)
    return torch.exp(scores - shift.unsqueeze(-1)), lse
