"""Memory of lives on a device: views within what lies around them, caches as they were before a call, steps that are captured."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvgen.runtime.kvcache import KVCache


def placed(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same view on a device, where what lies around it is copied, too."""
    memory = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return memory.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def restoring(cache: KVCache) -> Callable[[], None]:
    """What makes the cache again what it is now, so that a call can be repeated."""
    sequences = cache.sequences
    kept = [(x, x.clone()) for x in (*cache.tensors[:4], sequences.least) if x is not None]
    known = sequences.bound, sequences.uniform

    def restore() -> None:
        for tensor, before in kept:
            tensor.copy_(before)
        sequences.bound, sequences.uniform = known

    return restore


def replayable(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The step, captured in a CUDA graph that its calls replay; on the CPU the step itself. On a GPU it was called once before."""
    if device.type == "cpu":
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
