"""A kernel with a planted error."""

from __future__ import annotations

from typing import Any

import torch

from kvgen.api import Kernel
from kvgen.format.places import param_offsets
from kvgen.runtime.kvcache import KVCache


class Planted:
    """A kernel whose caches have the scales of one KV head off by 5 %, as a kernel would that reads them wrongly."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def prefill(self, cache: KVCache, k: torch.Tensor, v: torch.Tensor, **options: Any) -> None:
        self.kernel.prefill(cache, k, v, **options)
        words = cache.packed[:, 1].contiguous().view(torch.float16)
        places = param_offsets(self.kernel.layout, "key")[0].flatten().to(words.device) // 2
        words[..., places] = (words[..., places].float() * 1.05).half()
        cache.packed[:, 1] = words.view(torch.uint8)
