"""Steps on a GPU: a plan for all layers within a CUDA graph, whose replays follow the lengths; free places; steps without room."""

from __future__ import annotations

import pytest
import torch

from kvgen._resources import templates
from kvgen.errors import CacheMismatch
from kvgen.lower.backend import Source
from kvgen.lower.template import reached_headers
from kvgen.runtime.calls import Variant
from kvgen.runtime.kvcache import KVCache
from kvgen.toolchain import build
from tests.gpu.oracle import normal
from tests.support.kernel_cases import KernelCase
from tests.support.kernel_cases import variant as compiled
from tests.unit.lower_cuda.emulate_plan import CALLS, Planner
from tests.unit.lower_cuda.plan_checks import OfAnyPlanner, random_plans_agree

LAYERS, LENGTHS = 2, [9000, 0, 130, 4000, 127]


@pytest.fixture(scope="module", params=["cuda", "tilelang"])
def variant(request: pytest.FixtureRequest) -> Variant:
    return compiled(KernelCase("k4v4:h8/2", backend=request.param))


def random(tokens: int, heads: int, seed: int) -> torch.Tensor:
    return normal(seed, len(LENGTHS), tokens, heads, 128, dtype=torch.float16)


def filled(variant: Variant, max_len: int) -> list[KVCache]:
    first = variant.new_cache(len(LENGTHS), max_len, "cuda")
    caches = [first, *(variant.new_cache(like=first) for _ in range(LAYERS - 1))]
    for number, cache in enumerate(caches):
        variant.prefill(cache, random(9000, 2, number), random(9000, 2, 9 + number), LENGTHS, advance=False)
    first.advance(LENGTHS)
    return caches


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert float((got.float() - want.float()).norm() / want.float().norm()) < 2e-3


def test_replays_of_a_step_follow_the_lengths(variant: Variant) -> None:
    """150 steps, in which every residual becomes a block, against calls that plan for themselves."""
    caches, alone = filled(variant, 9200), []
    for number in range(LAYERS):
        cache = variant.new_cache(len(LENGTHS), 9200, "cuda")
        variant.prefill(cache, random(9000, 2, number), random(9000, 2, 9 + number), LENGTHS)
        alone.append(cache)
    q, k, v = (torch.empty_like(random(1, heads, 0)) for heads in (8, 2, 2))
    variant.decode(q, k, v, caches[0], plan=variant.plan(caches[0]))  # loads the module before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = variant.plan(caches[0])
        outs = [variant.decode(q, k, v, cache, lse=True, plan=plan) for cache in caches]
        caches[0].advance(1)
    for step in range(150):
        for tensor, seed in ((q, step), (k, 1000 + step), (v, 2000 + step)):
            tensor.copy_(random(1, tensor.shape[2], seed))
        graph.replay()
        for (out, lse), cache in zip(outs, alone, strict=True):
            want, want_lse = variant.decode(q, k, v, cache, lse=True)
            taking_part = [b for b, length in enumerate(LENGTHS) if length]
            close(out[taking_part], want[taking_part])  # splits begin elsewhere where empty sequences take no part
            close(lse[taking_part], want_lse[taking_part])
            assert not out[1].any()
            assert (lse[1] == -torch.inf).all()
    assert caches[1].lengths.tolist() == [n + 150 if n else 0 for n in LENGTHS]
    assert caches[0].bound == caches[0].max_len
    for mine, other in zip(caches, alone, strict=True):
        for a, b in zip(variant.unpack(mine), variant.unpack(other), strict=True):
            assert a.shape[1] == 9150
            assert all(torch.equal(a[i, : n + 150], b[i, : n + 150]) for i, n in enumerate(LENGTHS) if n)


def test_a_replay_without_room_writes_nothing_and_is_reported(variant: Variant) -> None:
    caches = filled(variant, 9001)
    q, k, v = random(1, 8, 0), random(1, 2, 1), random(1, 2, 2)
    out = torch.empty_like(q)
    variant.decode(q, k, v, caches[0], plan=variant.plan(caches[0]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = variant.plan(caches[0])
        variant.decode(q, k, v, caches[0], out=out, plan=plan)
        caches[0].advance(1)
    graph.replay()
    torch.cuda.synchronize()
    assert caches[0].lengths.tolist() == [9001, 0, 131, 4001, 128]
    variant.attend(q, caches[0])
    before = caches[0].k_residual[0].clone()
    out.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    assert caches[0].lengths.tolist() == [9001, 0, 132, 4002, 129]
    assert torch.equal(caches[0].k_residual[0].view(torch.int16), before.view(torch.int16)), "rows that nothing has written may be NaN"
    assert (out[0] == 7).all()
    assert not (out[2] == 7).all()
    with pytest.raises(CacheMismatch, match="had no room"):
        variant.attend(q, caches[0])
    variant.attend(q, caches[0])


@pytest.mark.parametrize("uniform", [True, False])
def test_a_plan_of_another_place_is_refused_within_a_capture(variant: Variant, uniform: bool) -> None:
    cache = filled(variant, 9200)[0]
    q, k, v = random(1, 8, 0), random(1, 2, 1), random(1, 2, 2)
    plan = variant.plan(cache, uniform=uniform)
    variant.decode(q, k, v, cache, plan=plan)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(ValueError, match="outside of this CUDA graph"):
            variant.decode(q, k, v, cache, plan=plan)
        inner = variant.plan(cache, uniform=uniform)
        variant.decode(q, k, v, cache, plan=inner)
    with pytest.raises(ValueError, match="within a CUDA graph"):
        variant.decode(q, k, v, cache, plan=inner)


def calls() -> Source:
    """The calls of a planner over kvgen's headers."""
    include = tuple(templates() / part / "include" for part in ("cuda", "common"))
    return Source(CALLS, "cuda", "sm90", include, headers=reached_headers(CALLS, include))


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(build(calls()).path, gpu=True)


class TestPlanOnAGpu(OfAnyPlanner):
    """The emulator runs one CTA after the other. Here all of them run at once."""

    def test_any_plan_is_the_oracles(self, planner: Planner) -> None:
        random_plans_agree(planner, 200)
