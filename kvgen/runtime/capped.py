"""Causal attention with a soft cap over dequantized K and V, by plain matrix products: torch's attention kernels know no soft cap.

Scores, weights and outputs are float32. Some queries of one sequence are computed at a time, so that memory is bounded. Products run at
the rate of float32, far below that of flash attention, and every score makes several passes over memory. Tokens before a sliding window
are computed and masked.
"""

from __future__ import annotations

import torch

SCORE_BYTES = 1 << 28
"""Most memory of float32 scores that exist at once, unless one query needs more; weights and masks take about as much again."""


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    used: torch.Tensor,
    bound: int,
    scale: float,
    softcap: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of q [batch, q_len, q_heads, head_dim], the last positions of the first `used[b]` tokens of k and v.

    k and v are [batch, room, kv_heads, head_dim], finite everywhere; `used` is int32 [batch] on the device, for which the host does not
    wait, and at most `bound`. Scores become softcap * tanh(score / softcap). With a `window`, a query sees only that many tokens, its own
    included. Returns out like q, and the LSE [batch, q_heads, q_len] in float32; a query that sees nothing gives 0 and -inf.
    """
    batch, tokens, q_heads, dim = q.shape
    heads = k.shape[2]
    group = q_heads // heads
    out = torch.empty_like(q)
    lse = torch.empty(batch, q_heads, tokens, dtype=torch.float32, device=q.device)
    step = max(1, SCORE_BYTES // (4 * q_heads * bound))
    for b in range(batch):
        keys, values = (x[b, :bound].transpose(0, 1).float() for x in (k, v))  # [kv_heads, bound, head_dim]
        for first in range(0, tokens, step):
            rows = slice(first, min(first + step, tokens))
            seen = min(bound, max(1, bound - tokens + rows.stop))  # later tokens no query of these rows sees
            queries = (q[b, rows].float() * (scale / softcap)).transpose(0, 1)
            scores = (queries.reshape(heads, -1, dim) @ keys[:, :seen].transpose(1, 2)).tanh_().mul_(softcap)
            scores = scores.view(heads, group, -1, seen).masked_fill_(~_visible(used[b] - tokens, rows, seen, window), -torch.inf)
            part = torch.logsumexp(scores, -1)
            weights = scores.sub_(part.masked_fill(part == -torch.inf, 0.0).unsqueeze(-1)).exp_()
            found = (weights.flatten(1, 2) @ values[:, :seen]).view(q_heads, -1, dim)
            out[b, rows] = found.transpose(0, 1).to(q.dtype)
            lse[b, :, rows] = part.flatten(0, 1)
    return out, lse


def _visible(before: torch.Tensor, rows: slice, seen: int, window: int | None) -> torch.Tensor:
    """Whether queries `rows`, the first query of all following `before` tokens, see each of the first tokens: bool [rows, seen]."""
    position = before + torch.arange(rows.start, rows.stop, device=before.device).unsqueeze(1)
    token = torch.arange(seen, device=before.device)
    visible = token <= position
    return visible if window is None else visible & (token > position - window)
