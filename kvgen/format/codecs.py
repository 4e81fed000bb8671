"""Codecs: how an element of K or V is stored, and what the other packages may ask about it.

A codec has five parts: encode, decode to an operand of the MMA, the unit of tokens or channels that share words, the correction outside
the MMA, and bytes. This module has its unit and its bytes; `templates/cuda/include/kvgen/codec/` and `templates/cpu/include/kvgen/codec/`
have a file for each codec with the arithmetic, `kvgen/lower/tilelang` expands codes by one function. No other file asks for bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kvgen.spec import QuantSpec


@dataclass(frozen=True)
class Codec:
    """What all codecs have. An operand is a matrix [rows, k]: of K, rows are tokens; of V, channels."""

    type: str
    """In C++, in namespace `kvgen`."""
    width: int
    """Bits of a stored element."""
    row_tile: int
    """Rows whose elements lie in the same words of a lane, in fragment order: 16, or 32."""
    words: int
    """Words of a lane for a row tile and a k-step, in fragment order."""
    quantized: bool
    """Whether elements are codes, which have a scale for each group."""
    label: str
    """In names of entries, tables and messages."""
    coarse: bool = False
    """Whether the error of its codes is hundreds of times as large as that of 16-bit weights."""
    byte_operands: bool = False
    """Whether a mask makes operands of products of 8-bit integers."""
    rows_of_byte: int = 1
    """Rows whose fields one byte holds, eight rows apart; they are separated after the MMA. 1: none."""
    integers: bool = False
    """Whether codes are integers."""
    largest: float = 0
    """The largest magnitude of a symmetric code."""
    largest_scale: float = 1
    """Of a group beside a static one, which multiplies it."""
    param_bytes: int | None = None
    """Bytes of a scale; None for those of the cache's scales."""
    header: str | None = None
    """The file of `codec/` that a rendered source includes for it; None for those that every source has."""

    @property
    def reach(self) -> float:
        """The largest magnitude that is stored with a static scale of 1."""
        return self.largest * self.largest_scale

    def place(self, row: torch.Tensor, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(word, first bit) of row `row` (below `row_tile`) and k-slot `slot` (below 16) among a lane's words, in fragment order."""
        if not self.quantized:
            return 2 * (slot // 8) + row // 8, 16 * (slot % 2)
        of_word = 8 * self.rows_of_byte
        return row // of_word, 8 * (2 * (slot % 2) + slot // 8) + self.width * (row % of_word // 8)


def _integers(bits: int, zero: bool) -> Codec:
    per_byte = 8 // bits
    words = max(1, 2 // per_byte)
    return Codec(
        f"Integers<{bits}, {str(zero).lower()}>", bits, row_tile=8 * per_byte * words, words=words, quantized=True, label=f"int{bits}",
        coarse=bits == 2, byte_operands=bits <= 4, rows_of_byte=per_byte, integers=True, largest=2 ** (bits - 1) - 1,
    )  # fmt: skip


_FLOATS = {
    "e4m3": Codec("Fp8<4, 3>", 8, 16, 2, True, "e4m3", largest=448, header="fp8"),
    "e5m2": Codec("Fp8<5, 2>", 8, 16, 2, True, "e5m2", largest=57344, header="fp8"),
    "nvfp4": Codec(
        "Fp4<kvgen::E4m3Scale>", 4, 16, 1, True, "nvfp4", largest=6, rows_of_byte=2, largest_scale=448, param_bytes=1, header="fp4"
    ),
    "mxfp4": Codec("Fp4<kvgen::E8m0Scale>", 4, 16, 1, True, "mxfp4", largest=6, rows_of_byte=2, param_bytes=1, header="fp4"),
}


def codec_of(quant: QuantSpec, element: int = 16) -> Codec:
    """The codec of K or V; `element`: bits of the cache's `dtype`."""
    return codec(quant.bits, element, quant.zero, quant.type)


def codec(bits: int, element: int, zero: bool, kind: str | None = None) -> Codec:
    """The same from the number of bits that a spec gives; 16 stands for elements as they are. `kind`: the type of codes."""
    if kind in _FLOATS:
        return _FLOATS[kind]
    return Codec("Unquantized<Element>", element, 16, 4, False, f"{element} bits") if bits == 16 else _integers(bits, zero)
