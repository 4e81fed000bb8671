"""One compiled launch on torch tensors."""

from __future__ import annotations

import torch

from kvgen.format.layout import PackedLayout
from kvgen.runtime.calls import Calls
from kvgen.runtime.executable import Executable
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.module import Module
from kvgen.spec import KernelSpec


class Variant(Calls):
    """The calls of one module, for all workloads; several variants may share caches of one layout."""

    def __init__(self, spec: KernelSpec, layout: PackedLayout, module: Module) -> None:
        self.executable = Executable(module, spec.attention.q_len)
        super().__init__(spec, layout, [self.executable])

    @property
    def module(self) -> Module:
        """The loaded module."""
        return self.executable.module

    def workspace(self, cache: KVCache) -> torch.Tensor:
        """The workspace for a cache. Raises as `prepare` does."""
        self.prepare(cache)
        return self.executable.workspace(cache)

    def release(self, cache: KVCache) -> None:
        """Give the workspace for a cache back; a captured graph must not outlive it."""
        self.executable.release(cache)
