"""Operations on a matrix to the bit (docs/matrix.md), the error metrics of the INT8 per-channel paper, and the checks of a variant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kvgen.errors import CheckError
from kvgen.runtime.matrix import MatrixVariant
from kvgen.verify import Check, OperationCheck
from kvgen.verify.packing import divide

LEVELS = 127
CHUNK = 1 << 24
"""Elements that are computed at once, so that the memory of a reference does not follow the matrix."""
QUERIES = 16
SHAPES = ((0, 5), (1, 1), (2, 31), (17, 33), (64, 64), (130, 257), (40, 1032), (1031, 20))
"""Tokens and channels: multiples of no vector, of some, of all; less and more than a CTA's tile; 1031 tokens divide among no threads."""
SENTINEL = -128
"""No code has this value."""
GAPS = (0, 3, 16)
"""Elements between the rows of a matrix."""


def scales(x: torch.Tensor) -> torch.Tensor:
    """max |x| / 127 of every channel of x [tokens, channels]: float32 [channels]; 0 where there are no tokens."""
    if x.shape[0] == 0:
        return torch.zeros(x.shape[1], device=x.device)
    levels = torch.full((), float(LEVELS), device=x.device)  # a number would not do: on a GPU torch multiplies by its rounded reciprocal
    return torch.maximum(x.amin(0).float().abs(), x.amax(0).float().abs()) / levels


def codes(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """clamp(rne(x / scale), -127, 127), 0 where the scale is 0: int8 like x."""
    return divide(x.float(), scale).clamp(-LEVELS, LEVELS).to(torch.int8)


def dequantized(code: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """code * scale in float32, rounded to `dtype`."""
    return (code.float() * scale).to(dtype)


def chunks(tokens: int, channels: int) -> Iterator[slice]:
    """Ranges of rows of about CHUNK elements."""
    step = max(1, CHUNK // max(1, channels))
    yield from (slice(first, min(tokens, first + step)) for first in range(0, tokens, step))


def uniform(tokens: int, channels: int, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> torch.Tensor:
    """The paper's data: uniform in [-1, 1), [tokens, channels]."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.empty(tokens, channels, dtype=dtype, device=device).uniform_(-1.0, 1.0, generator=generator)


@dataclass(frozen=True)
class Errors:
    """The paper's three metrics of a matrix that was quantized and read back."""

    l2: float
    """Square root of the sum of squared errors: it grows with the matrix."""
    max_abs: float
    """Largest error of an element; at most half a scale."""
    attention: float
    """Mean |q . k - q . k'| over tokens and queries that are uniform in [-1, 1); not divided by sqrt(channels)."""


def errors(x: torch.Tensor, read_back: torch.Tensor, seed: int = 1) -> Errors:
    """The metrics of a matrix and what was read back, [tokens, channels] both, in fp64."""
    channels = x.shape[1]
    queries = uniform(channels, QUERIES, torch.float32, "cpu", seed).to(x.device).double()
    squares = top = moved = torch.zeros((), dtype=torch.float64, device=x.device)
    for rows in chunks(*x.shape):
        difference = x[rows].double() - read_back[rows].double()
        squares = squares + difference.square().sum()
        top = torch.maximum(top, difference.abs().max())
        moved = moved + (difference @ queries).abs().sum()
    return Errors(float(squares.sqrt()), float(top), float(moved) / max(1, x.shape[0] * QUERIES))


class MatrixCheck(OperationCheck):
    """Every scale, code and element that is read back, to the bit, over ragged shapes; beyond the matrix nothing is written.

    Outputs lie within larger memory of sentinels; every call is repeated and must give the same bits.
    """

    variant: MatrixVariant

    def run(self) -> None:
        """All shapes, each with its own scales, and with scales that are too small. Raises CheckError at the first wrong number."""
        self.accuracy["relative_l2"] = 0.0  # which the reference is reproduced with; the rest are the metrics of `errors`
        for number, (tokens, channels) in enumerate(SHAPES):
            for name, x in self._matrices(tokens, channels, GAPS[number % len(GAPS)]):
                self._matrix(f"{tokens}x{channels}, {name}", x)
        if self.device == "cuda":
            self._replayed()

    def _matrices(self, tokens: int, channels: int, gap: int) -> Iterator[tuple[str, torch.Tensor]]:
        dtype, device = self.variant.dtype, self.device
        plain = uniform(tokens, channels, dtype, device)
        apart = torch.full((tokens, channels + gap), torch.nan, dtype=dtype, device=device)[:, :channels]
        yield f"{gap} elements between rows", apart.copy_(plain)
        wide = (plain.float() * torch.logspace(-4, 3, channels, device=device)).to(dtype)
        wide[:, channels // 2] = 0.0
        yield "unequal channels, one of zeros", wide
        ties = (torch.arange(tokens * channels, device=device).reshape(tokens, channels) % 255 - 127 + 0.5).to(dtype)
        ties[:1] = 127.0  # so that the scale is 1
        yield "quotients at rounding ties", ties.clamp(-127, 127)

    def _matrix(self, where: str, x: torch.Tensor) -> None:
        """Scales, codes and what is read back, of one matrix."""
        scale = scales(x)
        for _ in range(self.policy.repeats):
            same_bits(where, "scale", self.variant.scales(x, torch.full_like(scale, torch.nan)), scale)
        for given in (scale / 3, scale):
            want = codes(x, given)
            self._written(f"codes of {where}", want, partial(self.variant.quantize, x, given))
            self._written(f"read back {where}", dequantized(want, scale, x.dtype), partial(self.variant.dequantize, want, scale))

    def _written(self, where: str, want: torch.Tensor, call: Callable[[torch.Tensor], object]) -> None:
        """Run a call that writes a matrix, into memory with gaps between rows and around them, several times."""
        for number in range(self.policy.repeats):
            filler = SENTINEL if want.dtype == torch.int8 else torch.nan
            memory = torch.full((want.shape[0] + 2, want.shape[1] + GAPS[number % len(GAPS)]), filler, dtype=want.dtype, device=want.device)
            expected = memory.clone()
            expected[1:-1, : want.shape[1]] = want
            call(memory[1:-1, : want.shape[1]])
            same_bits(where, "element of the memory around it", memory, expected)

    def _replayed(self) -> None:
        """Scales and codes of a captured CUDA graph follow the matrix."""
        x = uniform(64, 96, self.variant.dtype, self.device, 1)
        scale, code = torch.empty(96, device=x.device), torch.empty(x.shape, dtype=torch.int8, device=x.device)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self.variant.scales(x, scale)
            self.variant.quantize(x, scale, code)
        x.mul_(3.0)
        graph.replay()
        same_bits("in a graph", "scale", scale, scales(x))
        same_bits("in a graph", "code", code, codes(x, scale))


class MatrixWorkloadCheck(Check):
    """The matrices of a workload: all of their scales, codes and elements. `out` is x itself where nothing is read back."""

    def __init__(
        self,
        variant: MatrixVariant,
        name: str,
        x: torch.Tensor,
        code: torch.Tensor,
        out: torch.Tensor,
        accuracy: dict[str, float] | None = None,
    ) -> None:
        self.variant, self.name, self.x, self.code, self.out = variant, name, x, code, out
        self.accuracy = {} if accuracy is None else accuracy

    def run(self) -> None:
        """Raises CheckError at the first wrong number. Keeps the INT8 paper's metrics of the matrix."""
        self.again()
        back = self.out if self.out is not self.x else torch.empty_like(self.x)
        found = errors(self.x, self.variant.dequantize(self.code, scales(self.x), back))
        self.accuracy |= {"relative_l2": 0.0, "l2_error": found.l2, "max_abs_error": found.max_abs, "attention_error": found.attention}

    def again(self) -> None:
        """The same calls after timing."""
        variant, x = self.variant, self.x
        scale = variant.scales(x, torch.full((x.shape[1],), torch.nan, device=x.device))
        same_bits(f"at {self.name}", "scale", scale, scales(x))
        variant.quantize(x, scale, self.code.fill_(SENTINEL))
        if self.out is not x:
            variant.dequantize(self.code, scale, self.out.fill_(torch.nan))
        for rows in chunks(*x.shape):
            same_bits(f"at {self.name}, rows from {rows.start}", "code", self.code[rows], codes(x[rows], scale))
            if self.out is not x:
                want = dequantized(self.code[rows], scale, variant.dtype)
                same_bits(f"at {self.name}, rows from {rows.start}", "element", self.out[rows], want)


def same_bits(where: str, what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Raises CheckError that names the first element with other bits."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    same = got.contiguous().view(whole) == want.contiguous().view(whole)
    if not bool(same.all()):
        first = (~same).nonzero()[0].tolist()
        at = tuple(first)
        count = f"{int((~same).sum())} of {got.numel()}"
        raise CheckError(f"{where}: {count}: {what} {first} is {got[at].item():g}, and {want[at].item():g} is right")
