"""Attention in fp64 against a loop over single scores."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvgen.verify import attention
from kvgen.verify.attention import attend


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float, softcap: float, window: int | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One query, one head, one key at a time."""
    batch, q_len, heads, dim = q.shape
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full((batch, heads, q_len), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(q_len):
                position = lengths[b] - q_len + i
                total, value = 0.0, torch.zeros(dim, dtype=torch.float64)
                for j in range(lengths[b]):
                    if j > position or (window is not None and j <= position - window):
                        continue
                    score = float(q[b, i, h].double() @ k[b, j, h * k.shape[2] // heads].double()) * scale
                    if softcap:
                        score = softcap * math.tanh(score / softcap)
                    total += math.exp(score)
                    value += math.exp(score) * v[b, j, h * k.shape[2] // heads].double()
                if sinks is not None:
                    total += math.exp(float(sinks[h]))
                if total > 0:
                    out[b, i, h], lse[b, h, i] = value / total, math.log(total)
    return out, lse


@given(
    share=st.integers(1, 3),
    q_len=st.integers(1, 4),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    softcap=st.sampled_from([0.0, 2.0]),
    window=st.sampled_from([None, 1, 3]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_a_plain_loop(
    share: int, q_len: int, lengths: list[int], softcap: float, window: int | None, with_sinks: bool, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    q = torch.randn(len(lengths), q_len, 2 * share, 8, generator=random)
    k, v = torch.randn(2, len(lengths), 9, 2, 8, generator=random)
    sinks = torch.randn(2 * share, generator=random) if with_sinks else None
    out, lse = attend(q, k, v, torch.tensor(lengths), scale=0.7, softcap=softcap, window=window, sinks=sinks)
    want, want_lse = plain(q, k, v, lengths, 0.7, softcap, window, sinks)
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-10, atol=1e-12)


def test_rows_in_pieces_are_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(1, 37, 4, 16), torch.randn(1, 50, 2, 16)
    whole = attend(q, k, k)
    monkeypatch.setattr(attention, "MAX_SCORES", 300)
    for a, b in zip(whole, attend(q, k, k), strict=True):
        torch.testing.assert_close(a, b)


def test_large_scores_do_not_overflow() -> None:
    q = torch.full((1, 1, 1, 16), 100.0)
    k = torch.zeros(1, 3, 1, 16)
    k[0, 1] = 100.0
    v = torch.eye(3, 16).reshape(1, 3, 1, 16)
    out, lse = attend(q, k, v)
    assert torch.equal(out[0, 0, 0], v[0, 1, 0].double())
    assert lse.item() == 40_000.0


def test_what_sees_nothing_gives_zero() -> None:
    q, k = torch.randn(1, 3, 2, 16), torch.randn(1, 4, 2, 16)
    out, lse = attend(q, k, k, torch.tensor([2]))
    assert not out[0, 0].any()  # its position would be -1
    assert bool((lse[0, :, 0] == -torch.inf).all())
    assert bool(torch.isfinite(lse[0, :, 1:]).all())
    _, lse = attend(q, k, k, torch.tensor([0]), sinks=torch.tensor([0.5, -0.5]))
    assert lse[0, :, 0].tolist() == [0.5, -0.5]


def test_keys_and_values_that_no_query_sees_are_never_read() -> None:
    q, k, v = torch.randn(1, 2, 2, 16), torch.randn(1, 9, 2, 16), torch.randn(1, 9, 2, 16)
    want = attend(q, k[:, :8], v[:, :8], window=4)
    k[:, :3], v[:, :3] = float("nan"), float("nan")  # the first query sees the positions from 3 on
    k[:, 8:], v[:, 8:] = float("nan"), float("nan")
    for a, b in zip(attend(q, k, v, torch.tensor([8]), window=4), want, strict=True):
        assert torch.equal(a, b)
