"""How far an output may be from the fp64 reference over the dequantized cache."""

from __future__ import annotations

import torch

LIMITS = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5}


def tolerance(dtype: torch.dtype | str) -> float:
    """Largest relative L2 error of an output in `dtype` (a torch type or a spec's name). Raises KeyError for other types."""
    return LIMITS[getattr(torch, dtype) if isinstance(dtype, str) else dtype]


def row_tolerance(dtype: torch.dtype | str, *, exact: bool = True) -> float:
    """Largest relative L2 error of a single row of an output in `dtype`, measured by `worst_relative_l2`. Raises KeyError like `tolerance`.

    In float16 it is that of all rows together. It is ten times as large in the other types, and without `exact`: for a schedule that leaves
    out rounding errors which the error of the format hides (`exact_q: false`).
    """
    factor = 1 if dtype in ("float16", torch.float16) and exact else 10
    return factor * tolerance(dtype)


def relative_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| over all elements, in fp64; inf where `got` has a NaN or an infinity that `want` lacks.

    Equal infinities (an LSE of nothing) do not count. Where `want` is all zero the result is |got|.
    """
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: {tuple(got.shape)} and {tuple(want.shape)}")
    mine, truth = got.detach().double(), want.detach().to(got.device).double()
    same = (mine == truth) & ~torch.isfinite(truth)
    mine, truth = mine.masked_fill(same, 0.0), truth.masked_fill(same, 0.0)
    if not bool(torch.isfinite(mine).all() and torch.isfinite(truth).all()):
        return float("inf")
    norm = float(truth.norm())
    error = float((mine - truth).norm())
    return error / norm if norm > 0 else error


def worst_relative_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest `relative_l2` over single rows [..., head_dim], each against the larger of its own and the mean row norm."""
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: {tuple(got.shape)} and {tuple(want.shape)}")
    mine, truth = got.detach().double(), want.detach().to(got.device).double()
    if not bool(torch.isfinite(mine).all()):
        return float("inf")
    norms = truth.norm(dim=-1)
    floor = norms.clamp(min=float(norms.mean()) or 1.0)
    return float(((mine - truth).norm(dim=-1) / floor).max()) if norms.numel() else 0.0
