"""How far the rounding of softmax weights to fp16 moves an output, and what would lower it: a simulation, on a CPU.

    python -m benchmarks.weight_rounding

The CUDA kernels multiply V's codes with `w = p * scale` rounded to fp16, and add the zeros in fp32 (docs/decisions/0002, 0003). The table
shows the worst relative L2 error of 128 query rows of 128 channels over 8192 tokens, for V per token, in fp64 but for the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.command import parser

ROWS, TOKENS, CHANNELS = 128, 8192, 128
OUTLIER = 8.0
"""Factor of one channel of V, as in `kvgen.reference.data.structured`."""


@dataclass(frozen=True)
class Quantized:
    """V [tokens, channels] with scale and zero per token [tokens, 1], the complement of half of the tokens included (0003)."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    top: int

    def with_scale_of_constants(self, scale: float) -> Quantized:
        """The same values, where groups of equal values, whose scale is 0, have `scale`: the complement moves into their zeros."""
        ours = torch.where(self.scale == 0, scale, self.scale)
        return Quantized(self.codes, ours, self.zero - (ours - self.scale) * self.codes[:, :1], self.top)


def quantize(v: torch.Tensor, bits: int) -> Quantized:
    """V per token, in one group of all channels, with fp16 scales and zeros (docs/numerics.md)."""
    top = 2**bits - 1
    low, high = v.amin(1, keepdim=True), v.amax(1, keepdim=True)
    zero, scale = low.half().double(), ((high - low) / top).half().double()
    codes = torch.where(scale > 0, torch.round((v.double() - zero) / scale), 0.0).clamp(0, top)
    down = (torch.arange(len(codes)) % 16 < 8).unsqueeze(1)
    return Quantized(torch.where(down, codes - top, codes), scale, torch.where(down, zero + top * scale, zero), top)


def rounded_to_half(weights: torch.Tensor) -> torch.Tensor:
    """Weights [rows, tokens] rounded to fp16, in units in which the largest of a row is near 2^10."""
    unit = torch.exp2(torch.floor(torch.log2(weights.amax(1, keepdim=True))) - 10)
    return (weights / unit).half().double() * unit


def as_it_is(p: torch.Tensor, v: Quantized) -> torch.Tensor:
    """The kernels today: rounded weights meet codes, exact ones the zeros."""
    v = v.with_scale_of_constants(2.0**-46)
    return rounded_to_half(p * v.scale.T) @ v.codes + p @ v.zero


def centered(p: torch.Tensor, v: Quantized) -> torch.Tensor:
    """The same with codes that count from their middle."""
    v = v.with_scale_of_constants(2.0**-46)
    middle = torch.where(v.codes.amin(1, keepdim=True) < 0, -v.top / 2, v.top / 2)
    return rounded_to_half(p * v.scale.T) @ (v.codes - middle) + p @ (v.zero + v.scale * middle)


def consistent(p: torch.Tensor, v: Quantized) -> torch.Tensor:
    """Rounded weights meet codes and zeros / scales."""
    v = v.with_scale_of_constants(2.0**-10)
    weights = rounded_to_half(p * v.scale.T)
    return weights @ v.codes + weights @ (v.zero / v.scale)


SUMS: dict[str, Callable[[torch.Tensor, Quantized], torch.Tensor]] = {"as it is": as_it_is, "centered": centered, "consistent": consistent}


def worst_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """Worst relative L2 error of a row."""
    return float(((out - exact).norm(dim=1) / exact.norm(dim=1)).max())


def values(seed: int) -> dict[str, torch.Tensor]:
    """V by the name of its data."""
    normal = torch.randn(TOKENS, CHANNELS, generator=torch.Generator().manual_seed(seed))
    outlier, constant = normal.clone(), normal.clone()
    outlier[:, 5] *= OUTLIER
    constant[1:] = -0.75
    return {"normal": normal, "one channel 8 times as large": outlier, "normal + 3": normal + 3, "all tokens but one constant": constant}


def main() -> None:
    """Print the table."""
    parser(__doc__).parse_args()
    normal = torch.randn(ROWS, TOKENS, generator=torch.Generator().manual_seed(1)).double()
    sink = normal.clone()
    sink[:, 0] += 12
    print("| scores | V | bits | " + " | ".join(SUMS) + " |\n|---|---|---|" + "---|" * len(SUMS))
    for scores, p in (("normal", torch.exp(normal)), ("a sink", torch.exp(sink))):
        for name, v in values(0).items():
            for bits in (8, 4, 2):
                q = quantize(v, bits)
                exact = p @ (q.codes * q.scale + q.zero)
                errors = (f"{worst_error(form(p, q), exact):.1e}" for form in SUMS.values())
                print(f"| {scores} | {name} | {bits} | " + " | ".join(errors) + " |")


if __name__ == "__main__":
    main()
