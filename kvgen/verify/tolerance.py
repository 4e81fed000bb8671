"""How far results may be from the fp64 reference over the dequantized cache: limits, and comparisons within them."""

from __future__ import annotations

import torch

from kvgen.errors import CheckError
from kvgen.format.layout import PackedLayout, Which
from kvgen.spec import KernelSpec
from kvgen.verify.packing import read_codes

LIMITS = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5}
TIES = 1e-3
"""Share of codes, scales and zeros that may differ by one step on a GPU, where rounding ties fall the other way."""
WHOLE = {2: torch.int16, 4: torch.int32}
"""Whole numbers by their bytes."""


class Comparison:
    """Compares with the limits of a spec; `accuracy` holds the worst figure by name. Every method raises CheckError beyond a limit.

    `exact`: whether the schedule carries the rounding errors that `exact_q: false` leaves out.
    """

    def __init__(self, spec: KernelSpec, device: torch.device, accuracy: dict[str, float] | None = None, *, exact: bool = True) -> None:
        self.limit, self.row_limit = tolerance(spec.attention.dtype), row_tolerance(spec.attention.dtype, exact=exact)
        self.ties = 0.0 if device.type == "cpu" else TIES
        self.accuracy: dict[str, float] = {} if accuracy is None else accuracy

    def output(self, where: str, out: torch.Tensor, lse: torch.Tensor | None, want: torch.Tensor, want_lse: torch.Tensor) -> None:
        """`out` over all rows and row by row, and the LSE where the call gave one."""
        self._bounded("relative_l2", where, relative_l2(out, want), self.limit)
        self._bounded("worst_row", where, worst_relative_l2(out, want), self.row_limit)
        if lse is None:
            return
        got, nothing = lse.double(), torch.isinf(want_lse)
        if not torch.equal(got[nothing], want_lse[nothing]):
            raise CheckError(f"{where}: LSE of a query that sees nothing is not -inf")
        error = ((got - want_lse).abs() / (1 + want_lse.abs()))[~nothing]
        self._bounded("lse_error", where, float(error.max()) if error.numel() else 0.0, self.limit)

    def sequences(self, name: str, where: str, got: torch.Tensor, want: torch.Tensor) -> None:
        """Tensors [batch, ...], sequence by sequence."""
        error, norm = ((x.flatten(1)).norm(dim=1) for x in (got.double() - want, want))
        ratio = (error / norm.masked_fill(norm == 0, 1.0)).nan_to_num(torch.inf)
        self._bounded(name, f"{where}, sequence {int(ratio.argmax())}", float(ratio.max()), self.limit)

    def codes(self, where: str, layout: PackedLayout, which: Which, got: torch.Tensor, want: torch.Tensor) -> None:
        """Codes, scales, zeros and boosted channels of packed blocks, uint8 [..., block_bytes]."""
        mine, truth = (read_codes(layout, which, blocks) for blocks in (got, want))
        where = f"codes of {which} {where}"
        for name in ("code", "scale", "zero", "boosted"):
            x, right = (mine.codes, truth.codes) if name == "code" else (getattr(mine, name), getattr(truth, name))
            if x is None:
                continue
            self._bounded(f"{name}_mismatches", where, float((x != right).double().mean()) if x.numel() else 0.0, self.ties)
            if name != "boosted" and not torch.equal(x, right):
                self._bounded(f"{name}_steps", where, float((_steps(x) - _steps(right)).abs().max()), 1.0)

    @staticmethod
    def same_bits(where: str, got: torch.Tensor, want: torch.Tensor) -> None:
        """The same inputs give the same bits, NaNs included."""
        whole = WHOLE[got.element_size()]
        if not torch.equal(got.view(whole), want.view(whole)):
            raise CheckError(f"{where}: the same inputs gave other bits")

    def _bounded(self, name: str, where: str, error: float, limit: float) -> None:
        """Keep an error; refuse one beyond the limit, NaN too."""
        self.accuracy[name] = max(self.accuracy.get(name, 0.0), error)
        if not error <= limit:
            raise CheckError(f"{where}: {name.replace('_', ' ')} is {error:.2g}, and at most {limit:.2g} is allowed")


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

    Equal infinities (an LSE of nothing) do not count. Where `want` is all zero the result is |got|. Raises ValueError for other shapes.
    """
    mine, truth = _pair(got, want)
    same = (mine == truth) & ~torch.isfinite(truth)
    mine, truth = mine.masked_fill(same, 0.0), truth.masked_fill(same, 0.0)
    if not bool(torch.isfinite(mine).all() and torch.isfinite(truth).all()):
        return float("inf")
    return float((mine - truth).norm()) / (float(truth.norm()) or 1.0)


def worst_relative_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest `relative_l2` over single rows [..., head_dim], each against the larger of its own and the mean row norm."""
    mine, truth = _pair(got, want)
    if not bool(torch.isfinite(mine).all()):
        return float("inf")
    norms = truth.norm(dim=-1)
    floor = norms.clamp(min=float(norms.mean()) or 1.0)
    return float(((mine - truth).norm(dim=-1) / floor).max()) if norms.numel() else 0.0


def _pair(got: torch.Tensor, want: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: {tuple(got.shape)} and {tuple(want.shape)}")
    return got.detach().double(), want.detach().to(got.device).double()


def _steps(x: torch.Tensor) -> torch.Tensor:
    """Numbers of a type as whole numbers of which neighbours differ by 1, int64."""
    if not x.is_floating_point():
        return x.long()
    bits = x.view(WHOLE[x.element_size()]).long()
    return torch.where(bits < 0, -(bits & (1 << 8 * x.element_size() - 1) - 1), bits)
