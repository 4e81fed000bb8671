"""The layers of a model that have one spec: their caches share lengths, and a step has one plan for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from kvgen.api.kernel import Kernel
from kvgen.runtime.kvcache import KVCache, row_of


class LayerGroup:
    """Caches of the layers of one spec, in the model's order."""

    def __init__(self, kernel: Kernel, caches: Sequence[KVCache]) -> None:
        self.kernel, self.caches = kernel, list(caches)
        attention = kernel.spec.attention
        self.plain = attention.window is None and not attention.softcap and not attention.sinks
        """Whether attention is causal and nothing else."""

    @property
    def first(self) -> KVCache:
        """The cache by which the lengths of all change."""
        return self.caches[0]

    def row(self, index: int, length: int) -> LayerGroup:
        """One sequence, of so many tokens, as a group of batch 1 over the same memory."""
        return LayerGroup(self.kernel, row_of(self.caches, index, length))

    def copy(self) -> LayerGroup:
        """The same tokens in other memory, for the same kernel."""
        return LayerGroup(self.kernel, deepcopy(self.caches))
