"""A kernel of operations on a matrix, as `get_matrix_kernel` gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from kvgen.api.threads import set_threads
from kvgen.arch import Target
from kvgen.registry.entry import Entry
from kvgen.registry.select import Selection
from kvgen.runtime.matrix import MatrixVariant, load_matrix
from kvgen.spec import MatrixShape, MatrixSpec
from kvgen.spec.workloads import coordinates_of, matrix_coordinates, nearest


class MatrixKernel:
    """Quantizes matrices [tokens, channels] to int8 with a float32 scale per channel, and reads them back.

    A call takes the launch that was tuned for the shape nearest to its own. Matrices are as `MatrixVariant` says; scales, codes and outputs
    are allocated where they are not given. Calls run on the current stream of the tensors' device.
    """

    def __init__(
        self, spec: MatrixSpec, target: Target, selection: Selection, launches: Sequence[tuple[MatrixShape, MatrixVariant]]
    ) -> None:
        self.spec, self.target, self.selection = spec, target, selection
        self._variants = [variant for _, variant in launches]
        self._tuned = [coordinates_of(shape) for shape, _ in launches]

    @classmethod
    def of(cls, spec: MatrixSpec, entry: Entry, selection: Selection, modules: Mapping[str, Path]) -> MatrixKernel:
        """The kernel of an entry whose compiled modules lie at these paths, by file. Raises KvgenError where one cannot be loaded."""
        variants = {file: load_matrix(spec, path) for file, path in modules.items()}
        launches = [(shape, variants[launch.file]) for launch in entry.launches if isinstance(shape := launch.workload, MatrixShape)]
        return cls(spec, entry.arch, selection, launches)

    @property
    def entry(self) -> Entry | None:
        """The registry's entry that this kernel comes from; None if it is a back end's default."""
        return self.selection.entry

    def __repr__(self) -> str:
        return f"<MatrixKernel {self.spec.name} for {self.target}: {self.selection.how}>"

    def variant(self, tokens: int, channels: int) -> MatrixVariant:
        """The compiled launch that a call of this shape takes."""
        if tokens < 1 or channels < 1 or len(self._variants) == 1:
            return self._variants[0]
        return self._variants[nearest(self._tuned, matrix_coordinates(tokens, channels))]

    def scales(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `MatrixVariant.scales`."""
        return self._for(x).scales(x, out)

    def quantize(
        self, x: torch.Tensor, scales: torch.Tensor | None = None, codes: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `MatrixVariant.quantize`."""
        return self._for(x).quantize(x, scales, codes)

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `MatrixVariant.dequantize`."""
        return self._for(codes).dequantize(codes, scales, out)

    def set_threads(self, count: int) -> None:
        """Threads of the following calls, for CPU kernels. Raises ValueError out of range and for GPU kernels, TypeError for no integer."""
        set_threads(self.target, (variant.module for variant in self._variants), count)

    def _for(self, x: torch.Tensor) -> MatrixVariant:
        if isinstance(x, torch.Tensor) and x.ndim == 2:
            return self.variant(*x.shape)
        return self._variants[0]  # which says what is wrong
