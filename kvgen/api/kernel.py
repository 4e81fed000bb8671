"""Kernels as a program gets them: compiled launches of an entry, called on torch tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvgen.arch import Target
from kvgen.format.layout import PackedLayout
from kvgen.registry.entry import Entry, Launch
from kvgen.registry.select import Selection, require_compiled
from kvgen.runtime import checks
from kvgen.runtime.calls import Calls, Variant
from kvgen.runtime.module import Functions, load
from kvgen.spec import KernelSpec, MatrixShape, MatrixSpec, Workload
from kvgen.spec.dispatch import Dispatch
from kvgen.spec.workloads import coordinates_of, matrix_coordinates, mean_length, nearest, parse

if TYPE_CHECKING:
    from kvgen.runtime.matrix import MatrixVariant


class Kernel(Calls):
    """Attention over a quantized KV cache: `new_cache`, `prefill`, `plan`, `decode`, `attend`, `unpack`. `get_kernel` makes it.

    Caches of one layout may be shared between kernels. Each call takes the launch that was tuned for its workload, else the one of the
    least modelled time for what the host knows of it (`kvgen.spec.dispatch`); the choice never waits for the device.
    """

    def __init__(
        self, spec: KernelSpec, target: Target, selection: Selection, layout: PackedLayout, variants: Sequence[Variant], dispatch: Dispatch
    ) -> None:
        """`dispatch` gives indices of `variants`."""
        self.target = target
        self.selection = selection
        self._variants = tuple(variants)
        super().__init__(spec, layout, [variant.executable for variant in self._variants], dispatch)

    @classmethod
    def of(cls, spec: KernelSpec, entry: Entry, selection: Selection, modules: Sequence[Path]) -> Kernel:
        """The kernel of an entry whose compiled modules lie at these paths, in the order of its launches.

        Raises KvgenError where a module cannot be loaded.
        """
        launches = [Variant(spec, entry.packed, load(path)) for path in modules]
        return cls(spec, entry.arch, selection, entry.packed, launches, entry.look_up(spec))

    @property
    def entry(self) -> Entry | None:
        """The registry's entry that this kernel comes from; None if the kernel is a back end's default."""
        return self.selection.entry

    def __repr__(self) -> str:
        return f"<Kernel {self.spec.name} for {self.target}: {self.selection.how}, layout {self.layout.id}>"

    def variant(self, workload: Workload | str) -> Variant:
        """The compiled launch that a call of this shape takes; `workload` and what it raises are as in `launch`."""
        return self._variants[self._index(workload)]

    def launch(self, workload: Workload | str) -> Launch | None:
        """The entry's launch for a call of this shape: back end and schedule. None if the kernel is a back end's default.

        `workload` is a `kvgen.spec.Workload` or its name, like "8x32768". Raises ValueError for what is no name and for more query tokens
        than `attention.q_len`, whose calls are extend attention, TypeError for other types.
        """
        index = self._index(workload)
        return self.entry.launches[index] if self.entry is not None else None

    def _index(self, workload: Workload | str) -> int:
        if isinstance(workload, str):
            workload = parse(workload)
        if not isinstance(workload, Workload):
            raise TypeError(f"workload must be a Workload or its name, like '8x32768', not {type(workload).__name__}")
        require_compiled(self.spec, workload)
        tokens = round(workload.batch * mean_length(workload))
        return self._dispatch.launch(workload.batch, workload.kv_len, workload.q_len, tokens)

    def set_threads(self, count: int) -> None:
        """Threads of the following calls, for CPU kernels: at most one for each processor of the machine.

        Raises ValueError out of range and for other kernels, TypeError if it is not an integer.
        """
        _set_threads(self.target, (launch.module for launch in self._distinct), count)

    def _device(self, device: torch.device | str | None) -> torch.device:
        """Where a new cache lies, which must be of the kernel's kind; by default the CPU or the current GPU."""
        where = checks.usable_device(device if device is not None else "cpu" if self.target == "cpu" else "cuda")
        if (where.type == "cpu") != (self.target == "cpu"):
            raise ValueError(f"this kernel is for {self.target}, and its caches cannot be on {where}")
        return where


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
    def of(cls, spec: MatrixSpec, entry: Entry, selection: Selection, modules: Sequence[Path]) -> MatrixKernel:
        """The kernel of an entry whose compiled launches lie at these paths, in order. Raises KvgenError where one cannot be loaded."""
        from kvgen.runtime.matrix import load_matrix  # no kernel of attention needs it

        variants = [load_matrix(spec, path) for _, path in zip(entry.launches, modules, strict=True)]
        launches = [(shape, variants[entry.launches.index(launch)]) for shape, launch in entry.tuned if isinstance(shape, MatrixShape)]
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
        _set_threads(self.target, (variant.module for variant in self._variants), count)

    def _for(self, x: torch.Tensor) -> MatrixVariant:
        return self.variant(*x.shape) if isinstance(x, torch.Tensor) and x.ndim == 2 else self._variants[0]  # which says what is wrong


def _set_threads(target: Target, modules: Iterable[Functions], count: int) -> None:
    if target != "cpu":
        raise ValueError(f"set_threads({count}): threads belong to CPU kernels, and this one is for {target}")
    count = checks.whole("threads", count, 1, os.cpu_count() or 1)
    for module in modules:
        if module.set_threads is not None:
            module.set_threads(count)
