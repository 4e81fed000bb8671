"""The kernel of attention as a program gets it: compiled launches of an entry, called on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from kvgen.arch import Target
from kvgen.format.layout import PackedLayout
from kvgen.registry.entry import Entry, Launch
from kvgen.registry.select import Selection, require_compiled
from kvgen.runtime import checks
from kvgen.runtime.calls import Calls, Variant
from kvgen.runtime.module import load, set_threads
from kvgen.spec import KernelSpec, Workload
from kvgen.spec.dispatch import Dispatch
from kvgen.spec.workloads import mean_length, parse


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
        set_threads(self.target, (launch.module for launch in self._distinct), count)

    def _device(self, device: torch.device | str | None) -> torch.device:
        """Where a new cache lies, which must be of the kernel's kind; by default the CPU or the current GPU."""
        where = checks.usable_device(device if device is not None else "cpu" if self.target == "cpu" else "cuda")
        if (where.type == "cpu") != (self.target == "cpu"):
            raise ValueError(f"this kernel is for {self.target}, and its caches cannot be on {where}")
        return where
