"""Attention in fp64, with everything the spec language can say."""

from __future__ import annotations

from collections.abc import Iterator

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
    batch, q_len, q_heads, head_dim = q.shape
    kv_heads = k.shape[2]
    if q_heads % kv_heads:
        raise ValueError(f"q_heads ({q_heads}) must be a multiple of kv_heads ({kv_heads})")
    share = q_heads // kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full((batch, q_heads, q_len), -torch.inf, dtype=torch.float64)
    for b in range(batch):
        length = k.shape[1] if lengths is None else int(lengths[b])
        for h in range(kv_heads):
            heads = slice(h * share, (h + 1) * share)
            keys, values = k[b, :length, h].double(), v[b, :length, h].double()
            sink = None if sinks is None else sinks[heads].double()
            for rows in _row_chunks(q_len, share * max(length, 1)):
                queries = q[b, rows, heads].double().transpose(0, 1)  # [share, rows, head_dim]
                visible = _visible(length, q_len, rows, window)
                part, part_lse = _softmax_values(queries @ keys.T * scale, values, visible, softcap, sink)
                out[b, rows, heads] = part.transpose(0, 1)
                lse[b, heads, rows] = part_lse
    return out, lse


def _row_chunks(q_len: int, scores_per_row: int) -> Iterator[slice]:
    step = max(1, MAX_SCORES // scores_per_row)
    return (slice(start, min(start + step, q_len)) for start in range(0, q_len, step))


def _visible(length: int, q_len: int, rows: slice, window: int | None) -> torch.Tensor:
    """bool [rows, length]."""
    query = torch.arange(rows.start, rows.stop).unsqueeze(1) + length - q_len
    key = torch.arange(length).unsqueeze(0)
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def _softmax_values(
    scores: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, softcap: float, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [share, rows, head_dim] and LSE [share, rows] of scores [share, rows, length]."""
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.unsqueeze(1))
    shift = torch.where(lse == -torch.inf, 0.0, lse)
    return torch.exp(scores - shift.unsqueeze(-1)) @ values, lse
