"""Attention in fp64 with every feature of the spec language, on the device of its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

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
    for (b, h, rows, first), found, logs in _parts(q, k, lengths, scale, softcap, window, sinks):
        heads = slice(h * q.shape[2] // k.shape[2], (h + 1) * q.shape[2] // k.shape[2])
        out[b, rows, heads] = (found[..., first:] @ v[b, first : found.shape[-1], h].double()).transpose(0, 1)
        lse[b, heads, rows] = logs
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
    for (b, h, rows, _), found, _ in _parts(q, k, lengths, scale, softcap, window, sinks):
        held[b, h * q.shape[2] // k.shape[2] : (h + 1) * q.shape[2] // k.shape[2], rows, : found.shape[-1]] = found
    return held


def _parts(
    q: torch.Tensor,
    k: torch.Tensor,
    lengths: torch.Tensor | None,
    scale: float | None,
    softcap: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> Iterator[tuple[tuple[int, int, slice, int], torch.Tensor, torch.Tensor]]:
    """Every query once, in pieces of at most MAX_SCORES scores: (sequence, KV head, rows, the first position that one of them sees),
    weights [heads, rows, length] and LSE [heads, rows]. Values before that position take no part, since 0 times a NaN is a NaN.
    """
    batch, q_len, q_heads, head_dim = q.shape
    share = q_heads // k.shape[2]
    if q_heads % k.shape[2]:
        raise ValueError(f"q_heads ({q_heads}) must be a multiple of kv_heads ({k.shape[2]})")
    for b, h in product(range(batch), range(k.shape[2])):
        length = k.shape[1] if lengths is None else int(lengths[b])
        keys, heads, step = k[b, :length, h].double(), slice(h * share, (h + 1) * share), max(1, MAX_SCORES // (share * max(length, 1)))
        for rows in (slice(start, min(start + step, q_len)) for start in range(0, q_len, step)):
            query = torch.arange(rows.start, rows.stop, device=q.device).unsqueeze(1) + length - q_len
            at = torch.arange(length, device=q.device)
            visible = (at <= query) if window is None else (at <= query) & (at > query - window)
            scores = q[b, rows, heads].double().transpose(0, 1) @ keys.T * (head_dim**-0.5 if scale is None else scale)
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~visible, -torch.inf)
            lse = torch.logsumexp(scores, -1) if length else scores.new_full(scores.shape[:-1], -torch.inf)
            if sinks is not None:
                lse = torch.logaddexp(lse, sinks[heads].double().unsqueeze(1))
            first = 0 if window is None else max(0, length - q_len + rows.start - window + 1)
            yield (b, h, rows, first), torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)), lse
