"""Verification of operations on a matrix: every scale, code and read-back element to the bit (docs/matrix.md), beyond the matrix nothing.

Outputs lie within larger memory that is filled with sentinels; every call is repeated and must give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kvgen.errors import CheckError
from kvgen.measure.job import CheckPolicy
from kvgen.runtime.matrix import MatrixVariant
from kvgen.verify import matrix as reference

SHAPES = ((0, 5), (1, 1), (2, 31), (17, 33), (64, 64), (130, 257), (40, 1032), (1031, 20))
"""Tokens and channels: multiples of no vector, of some, of all; less and more than a CTA's tile; 1031 tokens divide among no threads."""
SENTINEL = -128
"""No code has this value."""
GAPS = (0, 3, 16)
"""Elements between the rows of a matrix."""


class Case(NamedTuple):
    """A matrix by name."""

    name: str
    x: torch.Tensor


@dataclass
class MatrixCheck:
    """Verification of one variant. Every method raises CheckError at the first wrong number."""

    variant: MatrixVariant
    device: str
    policy: CheckPolicy
    accuracy: dict[str, float] = field(default_factory=lambda: {"relative_l2": 0.0})
    """`relative_l2` against the reference is 0, which it reproduces to the bit; the rest are the metrics of `errors`."""
    _last: tuple[torch.Tensor, torch.Tensor] | None = None

    def run(self) -> None:
        """All cases, each with its scales computed, and with scales that are too small."""
        for number, (tokens, channels) in enumerate(SHAPES):
            for case in self._cases(tokens, channels, GAPS[number % len(GAPS)]):
                self.matrix(case.name, case.x)
        if self.device == "cuda":
            self._replayed()

    def again(self) -> None:
        """Raises CheckError if the last call of `run` now gives other bits."""
        if self._last is not None:
            x, codes = self._last
            self._equal("after timing", "code", self.variant.quantize(x)[0], codes)

    def matrix(self, where: str, x: torch.Tensor) -> None:
        """Scales, codes and what is read back, of one matrix."""
        scale = reference.scales(x)
        got = torch.full_like(scale, torch.nan)
        for _ in range(self.policy.repeats):
            self.variant.scales(x, got)
            self._equal(where, "scale", got, scale)
        for given in (scale, scale / 3):
            codes = reference.codes(x, given)
            self._written(f"codes of {where}", x.shape, torch.int8, codes, lambda out, s=given: self.variant.quantize(x, s, out))
        back = reference.dequantized(codes, scale, self.variant.dtype)
        self._written(f"read back {where}", x.shape, self.variant.dtype, back, lambda out: self.variant.dequantize(codes, scale, out))
        self._last = x, reference.codes(x, scale)

    def errors(self, x: torch.Tensor, read_back: torch.Tensor) -> None:
        """Keep the INT8 paper's metrics of a matrix of a workload."""
        found = reference.errors(x, read_back)
        self.accuracy |= {"l2_error": found.l2, "max_abs_error": found.max_abs, "attention_error": found.attention}

    def _cases(self, tokens: int, channels: int, gap: int) -> list[Case]:
        dtype, seed = self.variant.dtype, self.policy.seed
        shape = f"{tokens}x{channels}"
        plain = reference.uniform(tokens, channels, dtype, self.device, seed)
        wide = (plain.float() * torch.logspace(-4, 3, channels, device=self.device)).to(dtype)
        wide[:, channels // 2] = 0.0
        ties = (torch.arange(tokens * channels, device=self.device).reshape(tokens, channels) % 255 - 127 + 0.5).to(dtype)
        ties[:1] = 127.0  # so that the scale is 1
        return [
            Case(f"{shape}, {gap} elements between rows", _apart(plain, gap)),
            Case(f"{shape}, unequal channels, one of zeros", wide),
            Case(f"{shape}, quotients at rounding ties", ties.clamp(-127, 127)),
        ]

    def _written(self, where: str, shape: torch.Size, dtype: torch.dtype, want: torch.Tensor, call: object) -> None:
        """Run a call that writes a matrix, into memory with gaps between rows and around them, several times."""
        assert callable(call)
        first: torch.Tensor | None = None
        for number in range(self.policy.repeats):
            gap = GAPS[number % len(GAPS)]
            filler = SENTINEL if dtype == torch.int8 else torch.nan
            memory = torch.full((shape[0] + 2, shape[1] + gap), filler, dtype=dtype, device=self.device)
            call(memory[1:-1, : shape[1]])
            self._equal(where, "element", memory[1:-1, : shape[1]], want)
            outside = memory.clone()
            outside[1:-1, : shape[1]] = filler
            self._equal(where, "element outside the matrix", outside, torch.full_like(outside, filler))
            first = memory[1:-1, : shape[1]].clone() if first is None else first
            self._equal(where, "element of a repeated call", memory[1:-1, : shape[1]], first)

    def _replayed(self) -> None:
        """Scales and codes of a captured CUDA graph follow the matrix."""
        x = reference.uniform(64, 96, self.variant.dtype, self.device, 1)
        scale, codes = torch.empty(96, device=x.device), torch.empty(x.shape, dtype=torch.int8, device=x.device)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self.variant.scales(x, scale)
            self.variant.quantize(x, scale, codes)
        x.mul_(3.0)
        graph.replay()
        self._equal("in a graph", "scale", scale, reference.scales(x))
        self._equal("in a graph", "code", codes, reference.codes(x, scale))

    @staticmethod
    def _equal(where: str, what: str, got: torch.Tensor, want: torch.Tensor) -> None:
        whole = {1: torch.int8, 2: torch.int16, 4: torch.int32}[got.element_size()]
        same = got.contiguous().view(whole) == want.contiguous().view(whole)
        if not bool(same.all()):
            wrong, count = (~same).nonzero()[0].tolist(), int((~same).sum())
            at = tuple(wrong)
            raise CheckError(f"{where}: {count} of {got.numel()}: {what} {wrong} is {got[at].item():g}, and {want[at].item():g} is right")


@dataclass
class MatrixWorkloadCheck:
    """The matrices of a workload: all of their scales, codes and elements. See `kvgen.measure.protocols.WorkloadCheck`."""

    check: MatrixCheck
    name: str
    x: torch.Tensor
    codes: torch.Tensor
    out: torch.Tensor

    def prepare(self) -> None:
        """Nothing: what is expected is computed by ranges of rows."""

    def run(self) -> None:
        """Raises CheckError at the first wrong number."""
        self._compare()
        back = self.out if self.out is not self.x else torch.empty_like(self.x)
        self.check.errors(self.x, self.check.variant.dequantize(self.codes, reference.scales(self.x), back))

    def again(self) -> None:
        """The same calls after timing."""
        self._compare()

    def close(self) -> None:
        """Nothing is held."""

    def _compare(self) -> None:
        variant, x = self.check.variant, self.x
        scale = variant.scales(x, torch.full((x.shape[1],), torch.nan, device=x.device))
        self.check._equal(f"at {self.name}", "scale", scale, reference.scales(x))
        variant.quantize(x, scale, self.codes.fill_(SENTINEL))
        back = None
        if self.out is not x:
            back = variant.dequantize(self.codes, scale, self.out.fill_(torch.nan))
        for rows in reference.chunks(*x.shape):
            self.check._equal(f"at {self.name}, rows from {rows.start}", "code", self.codes[rows], reference.codes(x[rows], scale))
            if back is not None:
                want = reference.dequantized(self.codes[rows], scale, variant.dtype)
                self.check._equal(f"at {self.name}, rows from {rows.start}", "element", back[rows], want)


def _apart(x: torch.Tensor, gap: int) -> torch.Tensor:
    """The same matrix with NaN between its rows."""
    memory = torch.full((x.shape[0], x.shape[1] + gap), torch.nan, dtype=x.dtype, device=x.device)
    memory[:, : x.shape[1]] = x
    return memory[:, : x.shape[1]]
