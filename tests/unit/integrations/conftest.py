"""What the tests of models over kvgen's caches share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvgen.api import FallbackWarning


@pytest.fixture
def cache_of() -> Iterator[Callable[..., Any]]:
    """Makes the `KvgenCache` of a model, which then runs kvgen's attention.

    Nothing is tuned for the models of these tests. Everything runs on one thread, because threads would only wait for each other.
    """
    pytest.importorskip("transformers")
    from kvgen.integrations.transformers import KvgenCache

    def make(model: Any, spec: Any, batch: int, max_len: int = 160) -> KvgenCache:
        model.set_attn_implementation("kvgen")
        cache = KvgenCache(model.config, spec, batch, max_len)
        for group in cache.groups:
            group.kernel.set_threads(1)
        return cache

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        yield make
    torch.set_num_threads(threads)
