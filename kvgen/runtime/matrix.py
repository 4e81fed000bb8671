"""Operations on a matrix, called on torch tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from kvgen.format.dtypes import torch_dtype
from kvgen.runtime import checks
from kvgen.runtime.module import MatrixModule, load_as
from kvgen.spec import MatrixSpec


class MatrixVariant:
    """One compiled schedule, for matrices of any shape. The calls run on the current stream of the tensors' device.

    Matrices are [tokens, channels] in the spec's dtype; their rows may lie apart (a stride), the elements of a row side by side. Codes
    are int8 in -127 .. 127, scales float32 [channels]. Values must be finite. Every call raises TypeError for another type and ValueError
    for another shape, device or memory.
    """

    def __init__(self, spec: MatrixSpec, module: MatrixModule) -> None:
        self.spec, self.module = spec, module
        self.dtype = torch_dtype(spec.matrix.dtype)

    def scales(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """max |x| / 127 of every channel, over all tokens."""
        checks.matrix("scales", x=x, out=out)
        out = torch.empty(x.shape[1], dtype=torch.float32, device=x.device) if out is None else out
        self._serving(x).scales(x, out)
        return out

    def quantize(self, x: Tensor, scales: Tensor | None = None, codes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Codes and scales. Given scales are used as they are, and codes beyond -127 .. 127 clamped; otherwise x is read twice."""
        checks.matrix("quantize", x=x, scales=scales, codes=codes)
        scales = self.scales(x) if scales is None else scales
        codes = torch.empty(x.shape, dtype=torch.int8, device=x.device) if codes is None else codes
        self._serving(x).quantize(x, scales, codes)
        return codes, scales

    def dequantize(self, codes: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
        """codes * scales, rounded to the spec's dtype."""
        checks.matrix("dequantize", codes=codes, scales=scales, out=out)
        out = torch.empty(codes.shape, dtype=self.dtype, device=codes.device) if out is None else out
        self._serving(codes).dequantize(codes, scales, out)
        return out

    def _serving(self, x: Tensor) -> MatrixModule:  # noqa: ARG002 - a kernel of several launches chooses by the shape
        """The module that a call over a matrix of this shape takes."""
        return self.module


def load_matrix(spec: MatrixSpec, path: Path) -> MatrixVariant:
    """A compiled schedule. Raises KvgenError if it cannot be loaded or lacks a function."""
    return MatrixVariant(spec, load_as(path, MatrixModule))
