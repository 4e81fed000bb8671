"""Kernels of every operation as a program gets them: compiled launches of an entry, called on tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from kvgen.arch import Target
from kvgen.registry.entry import Entry, Launch
from kvgen.registry.select import Selection, by_rows, require_compiled
from kvgen.runtime import checks
from kvgen.runtime.calls import Calls, Variant
from kvgen.runtime.linear import LinearVariant
from kvgen.runtime.matrix import MatrixVariant
from kvgen.runtime.module import Functions, LinearModule, MatrixModule, load, load_as, set_threads
from kvgen.spec import KernelSpec, LinearSpec, MatrixSpec, Workload
from kvgen.spec.workloads import coordinates_of, matrix_coordinates, mean_length, nearest, parse


class Registered:
    """What kernels of every operation have: they come from the registry, or are a back end's default, and on a CPU they have threads."""

    target: Target
    selection: Selection
    modules: Sequence[Functions]
    """The compiled launches, in the order of the entry."""

    @property
    def entry(self) -> Entry | None:
        """The registry's entry that this kernel comes from; None if it is a back end's default."""
        return self.selection.entry

    def set_threads(self, count: int) -> None:
        """Threads of the following calls, for CPU kernels: at most one for each processor of the machine.

        Raises ValueError out of range and for other kernels, TypeError if it is not an integer.
        """
        set_threads(self.target, self.modules, count)


class Kernel(Registered, Calls):
    """Attention over a quantized KV cache: `new_cache`, `prefill`, `plan`, `decode`, `attend`, `unpack`. `get_kernel` makes it.

    Caches of one layout may be shared between kernels. Each call takes the launch that was tuned for its workload, else the one of the
    least modelled time for what the host knows of it (`kvgen.spec.dispatch`); the choice never waits for the device.
    """

    def __init__(self, spec: KernelSpec, entry: Entry, selection: Selection, modules: Sequence[Path]) -> None:
        """The kernel of an entry whose compiled modules lie at these paths, in the order of its launches.

        Raises KvgenError where a module cannot be loaded.
        """
        self.target, self.selection = entry.arch, selection
        self._variants = tuple(Variant(spec, entry.packed, load(path)) for path in modules)
        self.modules = [variant.module for variant in self._variants]
        super().__init__(spec, entry.packed, [variant.executable for variant in self._variants], entry.look_up(spec))

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

    def _device(self, device: torch.device | str | None) -> torch.device:
        """Where a new cache lies, which must be of the kernel's kind; by default the CPU or the current GPU."""
        where = checks.usable_device(device if device is not None else "cpu" if self.target == "cpu" else "cuda")
        if (where.type == "cpu") != (self.target == "cpu"):
            raise ValueError(f"this kernel is for {self.target}, and its caches cannot be on {where}")
        return where


class MatrixKernel(Registered, MatrixVariant):
    """Quantizes matrices [tokens, channels] to int8 with a float32 scale per channel, and reads them back.

    A call takes the launch that was tuned for the shape nearest to its own. Scales, codes and outputs are allocated where they are not
    given. Calls run on the current stream of the tensors' device.
    """

    def __init__(self, spec: MatrixSpec, entry: Entry, selection: Selection, modules: Sequence[Path]) -> None:
        """The kernel of an entry whose compiled launches lie at these paths, in order. Raises KvgenError where one cannot be loaded."""
        self.modules = loaded = [load_as(path, MatrixModule) for path in modules]
        super().__init__(spec, loaded[0])
        self.target, self.selection = entry.arch, selection
        tuned = [(shape, loaded[entry.launches.index(launch)]) for shape, launch in entry.tuned]
        self._nearest = [module for _, module in tuned]
        self._tuned = [coordinates_of(shape) for shape, _ in tuned]

    def __repr__(self) -> str:
        return f"<MatrixKernel {self.spec.name} for {self.target}: {self.selection.how}>"

    def variant(self, tokens: int, channels: int) -> MatrixVariant:
        """The compiled launch that a call of this shape takes."""
        return MatrixVariant(self.spec, self._at(tokens, channels))

    def _serving(self, x: torch.Tensor) -> MatrixModule:
        return self._at(*x.shape)

    def _at(self, tokens: int, channels: int) -> MatrixModule:
        if tokens < 1 or channels < 1:
            return self._nearest[0]
        return self._nearest[nearest(self._tuned, matrix_coordinates(tokens, channels))]


class LinearKernel(Registered, LinearVariant):
    """A linear layer over packed weights: `quantize`, `pack`, `unpack`, `dequantize`, and a call. `get_linear_kernel` makes it.

    A call takes the launch that was tuned for its rows, or for the next more.
    """

    def __init__(self, spec: LinearSpec, entry: Entry, selection: Selection, modules: Sequence[Path]) -> None:
        """The kernel of an entry whose compiled launches lie at these paths, in order. Raises KvgenError where one cannot be loaded."""
        self.modules = loaded = [load_as(path, LinearModule) for path in modules]
        self._by_rows = [loaded[index] for index in by_rows(entry)]
        super().__init__(spec, loaded[0], entry.arch, len(self._by_rows) - 1)
        self.selection = selection

    def __repr__(self) -> str:
        return f"<LinearKernel {self.spec.name} for {self.target}: {self.selection.how}, up to {self.rows} rows>"

    def variant(self, rows: int) -> LinearVariant:
        """The compiled launch that a call of so many rows takes. Raises ValueError for more than `rows`, TypeError for no integer."""
        return LinearVariant(self.spec, self._by_rows[checks.whole("rows", rows, 0, self.rows)], self.target, rows)

    def _serving(self, m: int) -> LinearModule:
        return self._by_rows[m]
