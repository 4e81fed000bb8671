"""The kernel of operations on a matrix as a program gets it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from kvgen.registry.entry import Entry
from kvgen.registry.select import Selection
from kvgen.runtime.matrix import MatrixVariant
from kvgen.runtime.module import MatrixModule, load_as, set_threads
from kvgen.spec import MatrixSpec
from kvgen.spec.workloads import coordinates_of, matrix_coordinates, nearest


class MatrixKernel(MatrixVariant):
    """Quantizes matrices [tokens, channels] to int8 with a float32 scale per channel, and reads them back.

    A call takes the launch that was tuned for the shape nearest to its own. Scales, codes and outputs are allocated where they are not
    given. Calls run on the current stream of the tensors' device.
    """

    def __init__(self, spec: MatrixSpec, entry: Entry, selection: Selection, modules: Sequence[Path]) -> None:
        """The kernel of an entry whose compiled launches lie at these paths, in order. Raises KvgenError where one cannot be loaded."""
        loaded = [load_as(path, MatrixModule) for path in modules]
        super().__init__(spec, loaded[0])
        self.target, self.selection = entry.arch, selection
        tuned = [(shape, loaded[entry.launches.index(launch)]) for shape, launch in entry.tuned]
        self._modules = [module for _, module in tuned]
        self._tuned = [coordinates_of(shape) for shape, _ in tuned]

    @property
    def entry(self) -> Entry | None:
        """The registry's entry that this kernel comes from; None if it is a back end's default."""
        return self.selection.entry

    def __repr__(self) -> str:
        return f"<MatrixKernel {self.spec.name} for {self.target}: {self.selection.how}>"

    def variant(self, tokens: int, channels: int) -> MatrixVariant:
        """The compiled launch that a call of this shape takes."""
        return MatrixVariant(self.spec, self._at(tokens, channels))

    def set_threads(self, count: int) -> None:
        """Threads of the following calls, for CPU kernels. Raises ValueError out of range and for GPU kernels, TypeError for no integer."""
        set_threads(self.target, self._modules, count)

    def _serving(self, x: torch.Tensor) -> MatrixModule:
        return self._at(*x.shape)

    def _at(self, tokens: int, channels: int) -> MatrixModule:
        if tokens < 1 or channels < 1:
            return self._modules[0]
        return self._modules[nearest(self._tuned, matrix_coordinates(tokens, channels))]
