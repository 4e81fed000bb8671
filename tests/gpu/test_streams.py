"""Calls over one cache from several streams and threads of a GPU take turns; captured calls keep their workspace."""

from __future__ import annotations

import pytest
import torch

from kvgen.runtime.calls import Variant
from kvgen.runtime.kvcache import KVCache
from tests.gpu.oracle import normal
from tests.support.kernel_cases import KernelCase, variant

TOKENS = 20000


@pytest.fixture(scope="module")
def kernel() -> Variant:
    return variant(KernelCase("k4v4:h8/2"))


def _random(seed: int, tokens: int, heads: int) -> torch.Tensor:
    return normal(seed, 1, tokens, heads, 128, dtype=torch.float16).contiguous()


def _filled(kernel: Variant) -> KVCache:
    cache = kernel.new_cache(1, TOKENS + 1000)
    kernel.prefill(cache, _random(1, TOKENS, 2), _random(2, TOKENS, 2))
    return cache


def test_streams_wait_for_each_other(kernel: Variant) -> None:
    """Each stream has a query of its own: a workspace shared at once would mix their partial results."""
    cache = _filled(kernel)
    queries = [_random(10 + i, 1, 8) for i in range(8)]
    truths = [kernel.attend(q, cache) for q in queries]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in queries]
    outs: list[list[torch.Tensor]] = [[] for _ in queries]
    for _ in range(50):
        for q, stream, mine in zip(queries, streams, outs, strict=True):
            with torch.cuda.stream(stream):
                mine.append(kernel.attend(q, cache))
    torch.cuda.synchronize()
    assert all(torch.equal(out, truth) for mine, truth in zip(outs, truths, strict=True) for out in mine)


def test_a_call_follows_the_current_stream(kernel: Variant) -> None:
    """The query arrives late on the side stream: on any other stream a call would read what was there before."""
    cache, right, stream = _filled(kernel), _random(5, 1, 8), torch.cuda.Stream()
    truth, q = kernel.attend(right, cache), torch.zeros_like(right)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        q.copy_(right)
        out = kernel.attend(q, cache)
    stream.synchronize()
    assert torch.equal(out, truth)


def test_a_graph_is_captured_after_calls_on_other_streams(kernel: Variant) -> None:
    cache, q, side = _filled(kernel), _random(5, 1, 8), torch.cuda.Stream()
    cache.bound = cache.max_len  # what a captured launch is sized for: as many splits here as there
    with torch.cuda.stream(side):
        truth = kernel.attend(q, cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.attend(q, cache)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(kernel.attend(q, cache), truth)
        assert torch.equal(out, truth)
