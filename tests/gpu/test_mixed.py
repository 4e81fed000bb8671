"""An entry whose workloads are served by two back ends: one cache, alternating launches, a captured graph."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import kvgen
from kvgen.api import forget
from kvgen.lower.backend import get_backend
from kvgen.registry.device import here
from kvgen.registry.entry import Entry
from kvgen.registry.store import Store
from kvgen.runtime.kvcache import KVCache
from kvgen.spec import KernelSpec, Workload, load_spec
from kvgen.spec.dispatch import ALIKE
from kvgen.spec.target import resolve
from kvgen.spec.timing import Timing
from kvgen.toolchain import build
from kvgen.verify.tolerance import relative_l2, tolerance
from tests.gpu.oracle import attend, contents, normal, with_new

pytestmark = pytest.mark.skipif(find_spec("tilelang") is None, reason="TileLang is not installed")

BATCH, CAPACITY, HEADS, KV_HEADS = 3, 1024, 32, 8
WINNERS = {256: "tilelang", 8192: "cuda"}
"""Back end by kv_len."""
SHORT, LONG = (Workload(batch=BATCH, kv_len=kv_len) for kv_len in WINNERS)
START = [370, 127, 0]
"""One sequence flushes after 14 steps, one at once, one begins empty."""


def _spec(paged: bool) -> KernelSpec:
    return load_spec(
        {
            "name": "mixed",
            "attention": {"q_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": 128},
            "key": {"bits": 4, "axis": "channel", "group": 128},
            "value": {"bits": 4, "axis": "token", "group": 128},
            "cache": {"layout": "paged", "page": 128} if paged else {},
            "workloads": [work.to_json() for work in (SHORT, LONG)],
        }
    )


@pytest.fixture(params=[False, True], ids=["contiguous", "paged"])
def kernel(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[kvgen.Kernel]:
    """Fetched from a registry that holds the mixed entry alone."""
    for name in ("REGISTRY", "SITE"):
        monkeypatch.setenv(f"KVGEN_{name}_DIR", str(tmp_path / name))
    spec, target, launches, layouts = _spec(request.param), resolve("native"), [], set()
    for work in spec.workloads:
        backend = get_backend(WINNERS[work.kv_len])
        schedule = backend.default(spec, target)
        source = backend.lower(spec, schedule, target)
        layouts.add(schedule.layout)
        launches.append((work, schedule, source, build(source)))
    assert len(layouts) == 1
    timings = tuple(Timing(work, 10.0) for work in spec.workloads)  # without times, tuned entries that ship would come first
    monkeypatch.setattr("kvgen.registry.entry.Entry._tilings", lambda entry: [ALIKE] * len(entry.launches))  # the nearest one serves
    Store(tmp_path / "REGISTRY").put(Entry.of(spec, target, launches, device=here(target), timings=timings))
    forget()
    yield kvgen.get_kernel(spec)
    forget()


def _random(seed: int, tokens: int, heads: int) -> torch.Tensor:
    return normal(seed, BATCH, tokens, heads, 128, dtype=torch.float16)


def _step(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _random(seed, 1, HEADS), _random(seed + 1, 1, KV_HEADS), _random(seed + 2, 1, KV_HEADS)


def _filled(kernel: kvgen.Kernel) -> KVCache:
    cache = kernel.new_cache(BATCH, CAPACITY)
    kernel.prefill(cache, _random(1, max(START), KV_HEADS), _random(2, max(START), KV_HEADS), START)
    return cache


def _expected(kernel: kvgen.Kernel, cache: KVCache, inputs: tuple[torch.Tensor, ...], lengths: list[int]) -> torch.Tensor:
    """What a decode step should give: the blocks that are full before it as packed, all else in dtype."""
    q, *new = inputs
    held = [contents(kernel.layout, cache, b, length) for b, length in enumerate(lengths)]
    return torch.stack([attend(kernel.spec, q[b], *with_new(old, new, b))[0] for b, old in enumerate(held)])


def test_a_growing_cache_goes_from_one_back_end_to_the_other(kernel: kvgen.Kernel) -> None:
    """2^10.5 tokens lie halfway between the workloads of the two, so at 1449 tokens the launch changes by itself."""
    cache = kernel.new_cache(BATCH, 2048)
    tokens = 1440
    kernel.prefill(cache, _random(1, tokens, KV_HEADS), _random(2, tokens, KV_HEADS))
    taken = set()
    for step in range(20):
        inputs = _step(10 * step)
        expected = _expected(kernel, cache, inputs, [tokens + step] * BATCH)
        taken.add(kernel.launch(Workload(batch=BATCH, kv_len=cache.bound + 1)).backend)
        assert relative_l2(kernel.decode(*inputs, cache), expected) <= tolerance(torch.float16)
    assert taken == {"tilelang", "cuda"}


def test_a_captured_graph_may_hold_both(kernel: kvgen.Kernel) -> None:
    """Beside it the same steps one by one over a cache of their own, whose contents tell what both should give."""
    captured, plain, lengths = _filled(kernel), _filled(kernel), list(START)
    static, graph = [_step(0), _step(5)], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # nothing ran on this cache before: its workspaces are there since it was made
        outs = [kernel.variant(work).decode(*inputs, captured) for work, inputs in zip((SHORT, LONG), static, strict=True)]
    for turn in range(70):
        expected = []
        for place, work in enumerate((SHORT, LONG)):
            inputs = _step(1000 * turn + 5 * place)
            expected.append(_expected(kernel, plain, inputs, lengths))
            kernel.variant(work).decode(*inputs, plain)
            for tensor, value in zip(static[place], inputs, strict=True):
                tensor.copy_(value)
            lengths = [length + 1 for length in lengths]
        graph.replay()
        for out, want in zip(outs, expected, strict=True):
            assert relative_l2(out, want) <= tolerance(torch.float16), turn
    assert captured.lengths.tolist() == plain.lengths.tolist() == lengths
