"""Attention in fp64 with every feature of the spec language, on the device of its arguments."""

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
    batch, q_len, q_heads, _ = q.shape
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.zeros((batch, q_heads, q_len), dtype=torch.float64, device=q.device)
    for b, rows, first, found, logs in _parts(q, k, lengths, scale, softcap, window, sinks):
        values = v[b, first : found.shape[-1]].double().transpose(0, 1)
        seen = found[..., first:].reshape(len(values), q_heads // len(values) * found.shape[1], values.shape[1]) @ values
        out[b, rows] = seen.view(q_heads, found.shape[1], -1).transpose(0, 1)
        lse[b, :, rows] = logs
    return out, lse


def weights(
    q: torch.Tensor, k: torch.Tensor, *, softcap: float = 0.0, window: int | None = None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention weights of positions: fp64 [batch, q_heads, q_len, tokens], 0 for positions that a query does not see."""
    held = torch.zeros(q.shape[0], q.shape[2], q.shape[1], k.shape[1], dtype=torch.float64, device=q.device)
    for b, rows, _, found, _ in _parts(q, k, None, None, softcap, window, sinks):
        held[b, :, rows] = found
    return held


def _parts(
    q: torch.Tensor,
    k: torch.Tensor,
    lengths: torch.Tensor | None,
    scale: float | None,
    softcap: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> Iterator[tuple[int, slice, int, torch.Tensor, torch.Tensor]]:
    """Every query once, in pieces of at most MAX_SCORES scores: sequence, rows, the first position that one of them sees, weights
    [q_heads, rows, length] and LSE [q_heads, rows]. Values before that position take no part, since 0 times a NaN is a NaN.
    """
    batch, q_len, q_heads, head_dim = q.shape
    if q_heads % k.shape[2]:
        raise ValueError(f"q_heads ({q_heads}) must be a multiple of kv_heads ({k.shape[2]})")
    for b in range(batch):
        length = k.shape[1] if lengths is None else int(lengths[b])
        keys, step = k[b, :length].double().permute(1, 2, 0), max(1, MAX_SCORES // (q_heads * max(length, 1)))
        for rows in (slice(start, min(start + step, q_len)) for start in range(0, q_len, step)):
            query = torch.arange(rows.start, rows.stop, device=q.device).unsqueeze(1) + length - q_len
            at = torch.arange(length, device=q.device)
            visible = (at <= query) if window is None else (at <= query) & (at > query - window)
            heads = q[b, rows].double().transpose(0, 1).reshape(len(keys), -1, head_dim)
            scores = (heads @ keys).view(q_heads, len(query), length) * (head_dim**-0.5 if scale is None else scale)
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~visible, -torch.inf)
            lse = torch.logsumexp(scores, -1) if length else scores.new_full(scores.shape[:-1], -torch.inf)
            if sinks is not None:
                lse = torch.logaddexp(lse, sinks.double().unsqueeze(1))
            first = 0 if window is None else max(0, length - q_len + rows.start - window + 1)
            yield b, rows, first, torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)), lse
