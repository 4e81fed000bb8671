"""Linear layers over packed weights, called on torch tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from kvgen.arch import Target, device_type
from kvgen.format import weights
from kvgen.format.dtypes import torch_dtype
from kvgen.format.weights import Canonical, Clip
from kvgen.runtime import checks
from kvgen.runtime.kvcache import new_bytes
from kvgen.runtime.module import LinearModule, load_as
from kvgen.spec import LinearSpec


class LinearVariant:
    """One compiled schedule: y = epilogue(x W^T + bias) for 0 to `rows` rows of x, on the current stream of the tensors' device.

    x is [m, k] and y [m, n] in the spec's dtype, with silu_mul y is [m, n / 2]; their rows may lie apart (a stride), the elements of a row
    lie side by side. A call allocates y where `out` is not given, and nothing else: with `out` it may be captured in a CUDA graph. The same
    inputs give the same bits. Calls with more rows are refused: `dequantize` and torch.matmul compute them.
    """

    def __init__(self, spec: LinearSpec, module: LinearModule, target: Target, rows: int) -> None:
        self.spec, self.module, self.target = spec, module, target
        self.rows = rows
        """The most rows of a call."""
        self.dtype, self.device_type = torch_dtype(spec.linear.dtype), device_type(target)
        self.features = spec.linear.features
        """Columns of y."""

    def pack(self, codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
        """The packed weight of codes uint8 [n, k], scales [n, k / group] in the spec's dtype and zeros uint8 like them, where the spec has
        zeros: uint8 [bytes], on the device of the codes. Raises ValueError for other tensors.
        """
        return self._kept(weights.pack(self.spec, Canonical(codes, scales, zeros), self.target))

    def quantize(self, weight: Tensor, clip: Clip = "none") -> Tensor:
        """The packed weight of a matrix [n, k] of any floating type, by the nearest codes. `clip="mse"` clips each group's range where that
        lowers its squared error. Raises ValueError for another shape and for values that are not finite.
        """
        return self._kept(weights.pack(self.spec, weights.quantize(self.spec.linear, weight, clip), self.target))

    def unpack(self, packed: Tensor) -> Canonical:
        """Codes, scales and zeros as they were packed. Raises ValueError for bytes of another size."""
        return weights.unpack(self.spec, packed, self.target)

    def dequantize(self, packed: Tensor) -> Tensor:
        """The matrix that the packed weight means, [n, k] in the spec's dtype; with silu_mul the rows of gate, then those of up.

        On a GPU one kernel writes it, on a CPU torch's operations do.
        """
        if self.module.expand is None or packed.device.type != self.device_type:
            return weights.dequantize(self.spec.linear, self.unpack(packed))
        weights.check_packed(self.spec.linear, packed)
        whole = torch.empty((self.spec.linear.n, self.spec.linear.k), dtype=self.dtype, device=packed.device)
        self.module.expand(packed, whole)
        return whole

    def __call__(
        self, x: Tensor, packed: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """y for x [m, k] and a packed weight. bias [n] is given where `linear.bias` says so, residual like y where the epilogue is add.

        Raises TypeError or ValueError for what is no tensor, for another shape, dtype, device or memory, for packed bytes of another size,
        and ValueError for more than `rows` rows.
        """
        checks.matrix("linear", x=x, packed=packed, bias=bias, residual=residual, out=out)
        m = x.shape[0]
        if m > self.rows:
            raise ValueError(
                f"linear: x has {m} rows, and this kernel is compiled for {self.rows}: multiply more by `dequantize(packed)` with "
                "torch.matmul, or name larger workloads in the spec"
            )
        if x.device.type != self.device_type:
            raise ValueError(f"linear: this kernel is for {self.target}, and x is on {x.device}")
        if out is None:
            out = torch.empty((m, self.features), dtype=self.dtype, device=x.device)
        self._serving(m).linear(x, packed, bias, residual, out)
        return out

    @staticmethod
    def _kept(packed: Tensor) -> Tensor:
        """Packed bytes where calls read them fast: on a CPU large ones in huge pages."""
        return packed if packed.device.type != "cpu" else new_bytes(packed.numel(), packed.device).copy_(packed)

    def _serving(self, m: int) -> LinearModule:  # noqa: ARG002 - a kernel of several launches chooses by the rows
        """The module that a call of so many rows takes."""
        return self.module


def load_linear(spec: LinearSpec, path: Path, target: Target, rows: int) -> LinearVariant:
    """A compiled schedule. Raises KvgenError if it cannot be loaded or lacks a function."""
    return LinearVariant(spec, load_as(path, LinearModule), target, rows)
