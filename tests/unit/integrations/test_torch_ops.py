"""Kernels as torch operators: schema, fake tensors, torch.compile without a graph break."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

import kvgen
from kvgen.api import forget
from kvgen.errors import CacheMismatch
from kvgen.integrations import torch_ops
from kvgen.registry.dispatch import Cell, DispatchTable
from kvgen.registry.store import Store
from kvgen.spec import KernelSpec
from tests.support.cpu import spec_of, variant
from tests.support.naive import naive_spec
from tests.unit.api.conftest import naive_entry, wanting

BATCH, TOKENS, CAPACITY = 2, 40, 96


@pytest.fixture(params=[False, True], ids=["contiguous", "paged"])
def spec(request) -> KernelSpec:
    return naive_spec(paged=request.param)


@pytest.fixture
def places(tmp_path, monkeypatch):
    for name in ("REGISTRY", "SITE"):
        monkeypatch.setenv(f"KVGEN_{name}_DIR", str(tmp_path / name))
    forget()
    yield tmp_path / "REGISTRY"
    forget()


@pytest.fixture
def kernel(spec, places):
    Store(places).put(naive_entry(spec))
    return kvgen.get_kernel(spec)


def _random(spec, tokens, heads, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, tokens, heads, spec.attention.head_dim, generator=generator)


def _step(spec, seed):
    attention = spec.attention
    return tuple(
        _random(spec, 1, heads, 10 * seed + i) for i, heads in enumerate((attention.q_heads, attention.kv_heads, attention.kv_heads))
    )


def _filled(kernel, spec):
    cache = kernel.new_cache(BATCH, CAPACITY)
    kernel.prefill(cache, _random(spec, TOKENS, 2, 1), _random(spec, TOKENS, 2, 2))
    return cache


def test_operators_keep_torchs_contract(kernel, spec):
    cache = _filled(kernel, spec)
    bound = torch_ops.Attention(kernel, cache)
    q, k, v = _step(spec, 3)
    rest = (*bound._cache(), bound.module, bound.scale, bound.max_len, bound.most_q)
    torch.library.opcheck(torch_ops.attend, (q, *rest))
    torch.library.opcheck(torch_ops.decode, (q, k, v, *rest))


def test_a_compiled_step_is_the_kernels_own(kernel, spec):
    plain, compiled = _filled(kernel, spec), _filled(kernel, spec)
    step = torch.compile(torch_ops.Attention(kernel, compiled), fullgraph=True, backend="aot_eager")
    for seed in range(3):
        q, k, v = _step(spec, seed)
        torch.testing.assert_close(step(q, k, v), kernel.decode(q, k, v, plain))
    assert compiled.lengths.tolist() == plain.lengths.tolist() == [TOKENS + 3] * BATCH
    compiled.grow(3)
    torch.testing.assert_close(kernel.unpack(compiled), kernel.unpack(plain))


def test_prompts_pass_too(kernel, spec):
    """More query tokens than the kernel is compiled for."""
    plain, compiled = _filled(kernel, spec), _filled(kernel, spec)
    bound = torch_ops.Attention(kernel, compiled)
    q, k, v = (_random(spec, 9, heads, seed) for seed, heads in enumerate((4, 2, 2)))
    torch.library.opcheck(torch_ops.attend, (q, *bound._cache(), bound.module, bound.scale, bound.max_len, bound.most_q))
    torch.testing.assert_close(torch.compile(bound, fullgraph=True, backend="aot_eager")(q, k, v), kernel.decode(q, k, v, plain))
    torch.testing.assert_close(bound.attend(q)[0], kernel.attend(q, plain))
    assert compiled.lengths.tolist() == [TOKENS + 9] * BATCH


def test_attend_gives_the_logsumexp(kernel, spec):
    cache = _filled(kernel, spec)
    q = _step(spec, 5)[0]
    for got, expected in zip(torch_ops.Attention(kernel, cache).attend(q), kernel.attend(q, cache, lse=True), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_module_is_found_by_its_path(kernel, spec):
    """As in a process that reads a compiled graph back."""
    bound = torch_ops.Attention(kernel, _filled(kernel, spec))
    q = _step(spec, 5)[0]
    expected = bound.attend(q)[0]
    torch_ops._modules.clear()
    torch.testing.assert_close(bound.attend(q)[0], expected)


def test_a_cache_of_another_layout_is_refused(kernel, spec):
    cache = _filled(kernel, spec)
    cache.layout_id = "another"
    cache.workspaces.clear()
    with pytest.raises(CacheMismatch):
        torch_ops.Attention(kernel, cache)


@pytest.mark.parametrize("uniform", [True, False])
def test_an_operator_takes_the_launch_of_a_captured_step(spec, places, uniform):
    """One launch for equal lengths and another for unequal ones: a cache at its capacity may hold either."""
    wide = wanting(spec, (BATCH, 32), (BATCH, 4096))
    cells = (Cell("2x512", 1, (3.0, 2.0), 2.0), Cell("2x8-512", 0, (1.0, 2.0), 1.0))
    Store(places).put(replace(naive_entry(wide, variants=2), dispatch=DispatchTable((), 0, (0, 1), cells)))
    kernel = kvgen.get_kernel(wide)
    cache = kernel.new_cache(BATCH, 512)
    cache.sequences.uniform = uniform
    taken = kernel.plan(cache, bound=cache.max_len).launch
    assert taken is kernel._launches[int(uniform)]
    bound = torch_ops.Attention(kernel, cache)
    assert bound.module == str(taken.module.path)
    assert bound.workspace is taken.workspace(cache)


def test_operators_take_turns_with_kernels_over_one_cache(kernel, spec):
    """The lock is the cache's: while a call holds it, an operator over the same blocks waits."""
    cache = _filled(kernel, spec)
    bound, q = torch_ops.Attention(kernel, cache), _step(spec, 5)[0]
    done = threading.Event()
    thread = threading.Thread(target=lambda: (bound.attend(q), done.set()))
    with cache.call_order.lock:
        thread.start()
        assert not done.wait(0.2)
    assert done.wait(60)
    thread.join()


def test_scales_that_float32_does_not_hold_are_refused(kernel, spec):
    with pytest.raises(ValueError, match="must be finite"):
        torch_ops.Attention(kernel, _filled(kernel, spec), scale=float("nan"))


def test_learned_sinks_belong_to_the_module() -> None:
    v, generator = variant(spec_of(sinks=True)), torch.Generator().manual_seed(1)
    q, k, x = (torch.randn(1, 1, heads, 64, generator=generator).half() for heads in (4, 2, 2))
    plain, bound = v.new_cache(1, 64), v.new_cache(1, 64)
    sinks = torch.tensor([-9.0, 0.0, 1.0, 5.0])
    module = torch_ops.Attention(v, bound, sinks=sinks)
    assert torch.equal(module(q, k, x), v.decode(q, k, x, plain, sinks=sinks))
    for got, want in zip(module.attend(q), v.attend(q, plain, lse=True, sinks=sinks), strict=True):
        assert torch.equal(got, want)
    with pytest.raises(ValueError, match="this format has learned sinks"):
        torch_ops.Attention(v, bound)
