"""Compares computed with expected results: limits, and the largest errors so far."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvgen.errors import CheckError
from kvgen.format.layout import PackedLayout, Which
from kvgen.runtime.kvcache import KVCache
from kvgen.spec import KernelSpec
from kvgen.verify.packing import read_codes
from kvgen.verify.quantize import Quantized
from kvgen.verify.tolerance import relative_l2, row_tolerance, tolerance, worst_relative_l2

NAN_BYTE = 255
"""Repeated, it is NaN in every format of scales and residuals."""
TIES = 1e-3
"""Share of codes, scales and zeros that may differ by one step on a GPU, where rounding ties fall the other way."""


class Comparison:
    """Compares with the limits of a spec; `accuracy` holds the worst figure by name. Every method raises CheckError beyond a limit.

    `exact`: whether the schedule carries the rounding errors that `exact_q: false` leaves out.
    """

    def __init__(self, spec: KernelSpec, device: torch.device, *, exact: bool = True) -> None:
        self.limit, self.row_limit = tolerance(spec.attention.dtype), row_tolerance(spec.attention.dtype, exact=exact)
        self.ties = 0.0 if device.type == "cpu" else TIES
        self.accuracy: dict[str, float] = {}

    def bounded(self, name: str, where: str, error: float, limit: float) -> None:
        """Keep an error; refuse one beyond the limit, NaN too."""
        self.accuracy[name] = max(self.accuracy.get(name, 0.0), error)
        if not error <= limit:
            raise CheckError(f"{where}: {name.replace('_', ' ')} is {error:.2g}, and at most {limit:.2g} is allowed")

    def output(self, where: str, out: torch.Tensor, lse: torch.Tensor | None, want: torch.Tensor, want_lse: torch.Tensor) -> None:
        """`out` over all rows and row by row, and the LSE where the call gave one."""
        self.bounded("relative_l2", where, relative_l2(out, want), self.limit)
        self.bounded("worst_row", where, worst_relative_l2(out, want), self.row_limit)
        if lse is None:
            return
        got = lse.double()
        nothing = torch.isinf(want_lse)
        if not torch.equal(got[nothing], want_lse[nothing]):
            raise CheckError(f"{where}: LSE of a query that sees nothing is not -inf")
        error = ((got - want_lse).abs() / (1 + want_lse.abs()))[~nothing]
        self.bounded("lse_error", where, float(error.max()) if error.numel() else 0.0, self.limit)

    def sequences(self, name: str, where: str, got: torch.Tensor, want: torch.Tensor) -> None:
        """Tensors [batch, ...], sequence by sequence."""
        errors = torch.stack([(got.double() - want).flatten(1).norm(dim=1), want.flatten(1).norm(dim=1)])
        ratio = errors[0] / errors[1].masked_fill(errors[1] == 0, 1.0)
        worst = float(ratio.max()) if bool(torch.isfinite(ratio).all()) else float("inf")
        self.bounded(name, f"{where}, sequence {int(ratio.nan_to_num(torch.inf).argmax())}", worst, self.limit)

    def codes(self, where: str, layout: PackedLayout, which: Which, blocks: torch.Tensor, want: Quantized) -> None:
        """Codes, scales, zeros and boosted channels of packed blocks, uint8 [..., block_bytes], against the reference's."""
        got = read_codes(layout, which, blocks)
        where = f"codes of {which} {where}"
        for name, x, truth in zip(("code", "scale", "zero", "boosted"), _parts(got), _parts(want), strict=True):
            if x is None or truth is None:
                continue
            if torch.equal(x, truth):
                self.accuracy.setdefault(f"{name}_mismatches", 0.0)
                continue
            self.bounded(f"{name}_mismatches", where, float((x != truth).double().mean()), self.ties)
            if name != "boosted":
                self.bounded(f"{name}_steps", where, float((_steps(x) - _steps(truth)).abs().max()), 1.0)

    @staticmethod
    def same_bits(where: str, got: torch.Tensor, want: torch.Tensor) -> None:
        """The same inputs give the same bits, NaNs included."""
        whole = {2: torch.int16, 4: torch.int32}[got.element_size()]
        if not torch.equal(got.view(whole), want.view(whole)):
            raise CheckError(f"{where}: the same inputs gave other bits")


def _parts(q: Quantized) -> tuple[torch.Tensor | None, ...]:
    """Codes, scales, zeros, boosted channels."""
    return q.codes, q.scale, q.zero, q.boosted


def changed(q: Quantized, by: Callable[[torch.Tensor], torch.Tensor]) -> Quantized:
    """The same change, such as a selection, of every part that there is."""
    return Quantized(by(q.codes), by(q.scale), *(None if x is None else by(x) for x in (q.zero, q.boosted)))


def _steps(x: torch.Tensor) -> torch.Tensor:
    """Numbers of a type as whole numbers of which neighbours differ by 1, int64."""
    if not x.is_floating_point():
        return x.long()
    bits = x.view({2: torch.int16, 4: torch.int32}[x.element_size()]).long()
    return torch.where(bits < 0, -(bits & (1 << 8 * x.element_size() - 1) - 1), bits)


def poisoned(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialized memory is simulated by NaN."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def poison(cache: KVCache) -> KVCache:
    """Fill the memory of a cache with NaN, so that a read of what was never written shows in the result."""
    cache.packed.fill_(NAN_BYTE)
    cache.k_residual.fill_(torch.nan)
    cache.v_residual.fill_(torch.nan)
    return cache
