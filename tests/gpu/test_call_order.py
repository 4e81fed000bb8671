"""Calls over one cache from several streams and threads of a GPU take turns; captured calls keep their workspace."""

from __future__ import annotations

import threading

import pytest
import torch

from kvgen.lower.backend import get_backend
from kvgen.lower.schedule import layout_of
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.module import load
from kvgen.runtime.variant import Variant
from kvgen.spec import load_spec
from kvgen.toolchain import build

TOKENS = 20000


@pytest.fixture(scope="module")
def kernel() -> Variant:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    spec = load_spec(
        {
            "name": "turns",
            "attention": {"q_heads": 8, "kv_heads": 2, "head_dim": 128},
            "key": {"bits": 4, "axis": "channel", "group": 128},
            "value": {"bits": 4, "axis": "token", "group": 128},
            "workloads": [{"batch": 1, "kv_len": TOKENS}],
        }
    )
    from kvgen.spec.target import resolve

    backend, target = get_backend("cuda"), resolve(spec.arch)
    schedule = backend.default(spec, target)
    return Variant(spec, layout_of(spec, schedule.layout), load(build(backend.lower(spec, schedule, target)).path))


def _random(seed: int, tokens: int, heads: int) -> torch.Tensor:
    return torch.randn(1, tokens, heads, 128, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").half()


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


def test_decoding_from_several_streams_is_decoding(kernel: Variant) -> None:
    one, several = _filled(kernel), _filled(kernel)
    streams = [torch.cuda.Stream() for _ in range(4)]
    steps = [(_random(3 * i, 1, 8), _random(3 * i + 1, 1, 2), _random(3 * i + 2, 1, 2)) for i in range(300)]
    truths = [kernel.decode(*step, one) for step in steps]
    torch.cuda.synchronize()
    outs = []
    for i, step in enumerate(steps):
        with torch.cuda.stream(streams[i % 4]):
            outs.append(kernel.decode(*step, several))
    torch.cuda.synchronize()
    assert all(torch.equal(out, truth) for out, truth in zip(outs, truths, strict=True))
    assert several.bound == TOKENS + 300
    assert several.lengths.tolist() == [TOKENS + 300]


def test_threads_with_streams_of_their_own(kernel: Variant) -> None:
    cache = _filled(kernel)
    queries = [_random(10 + i, 1, 8) for i in range(8)]
    truths = [kernel.attend(q, cache) for q in queries]
    torch.cuda.synchronize()
    wrong = []

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream() if index % 2 else torch.cuda.default_stream()):
            outs = [kernel.attend(queries[index], cache) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        wrong.extend(index for out in outs if not torch.equal(out, truths[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


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


def test_outputs_that_overlap_are_refused_in_prompts_too(kernel: Variant) -> None:
    cache, q = _filled(kernel), _random(7, 64, 8)
    with pytest.raises(ValueError, match="out overlaps with q"):
        kernel.attend(q, cache, out=q)
    with pytest.raises(ValueError, match="out overlaps with q"):
        kernel.attend(q[:, :1], cache, out=q[:, :1])


@pytest.mark.parametrize("which", [0, 1], ids=["k", "v"])
def test_a_nan_in_a_new_token_gives_nan_in_its_heads(kernel: Variant, which: int) -> None:
    cache, q, new = _filled(kernel), _random(5, 1, 8), [_random(6, 1, 2), _random(7, 1, 2)]
    new[which][0, 0, 0, 3] = torch.nan
    for out, lse in (kernel.decode(q, *new, cache, lse=True), kernel.attend(q, cache, lse=True)):
        spoiled = torch.zeros_like(out, dtype=torch.bool)
        spoiled[(0, 0, slice(0, 4)) if which == 0 else (0, 0, slice(0, 4), 3)] = True
        assert torch.equal(out.isnan(), spoiled)
        assert bool(lse[0, :4].isnan().all()) == (which == 0)
        assert lse[0, 4:].isfinite().all()


def test_a_nan_in_q_stays_in_its_head(kernel: Variant) -> None:
    cache, q = _filled(kernel), _random(5, 1, 8)
    truth = kernel.attend(q, cache)
    q[0, 0, 1, 3] = torch.nan
    out = kernel.attend(q, cache)
    assert out[0, 0, 1].isnan().all()
    assert out[0, 0, [0, *range(2, 8)]].isfinite().all()
    torch.testing.assert_close(out[0, 0, 2:], truth[0, 0, 2:], rtol=2e-3, atol=2e-3)
