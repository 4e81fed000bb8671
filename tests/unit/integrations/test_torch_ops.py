"""Kernels as torch operators: schema, fake tensors, torch.compile without a graph break."""

from __future__ import annotations

import copy

import pytest
import torch

import kvgen
from kvgen.api import forget
from kvgen.errors import CacheMismatch
from kvgen.integrations import torch_ops
from kvgen.lower import backend
from kvgen.registry.store import Store
from kvgen.spec import KernelSpec
from tests.support.cpu import spec_of, variant
from tests.support.naive import naive_spec
from tests.unit.api.conftest import WithNaive, naive_entry

BATCH, TOKENS, CAPACITY = 2, 40, 96


@pytest.fixture(params=[False, True], ids=["contiguous", "paged"])
def spec(request) -> KernelSpec:
    return naive_spec(paged=request.param)


@pytest.fixture
def places(tmp_path, monkeypatch):
    for name in ("REGISTRY", "SITE"):
        monkeypatch.setenv(f"KVGEN_{name}_DIR", str(tmp_path / name))
    real = backend.get_backend
    monkeypatch.setattr(backend, "get_backend", lambda name: WithNaive(real(name)))
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
    torch.library.opcheck(torch_ops.attend, (q, *bound._rest()))
    torch.library.opcheck(torch_ops.decode, (q, k, v, *bound._rest()))


def test_a_compiled_step_is_the_kernels_own(kernel, spec):
    plain, compiled = _filled(kernel, spec), _filled(kernel, spec)
    step = torch.compile(torch_ops.Attention(kernel, compiled), fullgraph=True, backend="aot_eager")
    for seed in range(3):
        q, k, v = _step(spec, seed)
        torch.testing.assert_close(step(q, k, v), kernel.decode(q, k, v, plain))
    assert compiled.lengths.tolist() == plain.lengths.tolist() == [TOKENS + 3] * BATCH
    torch.testing.assert_close(kernel.unpack(compiled), kernel.unpack(plain))


def test_prompts_pass_too(kernel, spec):
    """More query tokens than the kernel is compiled for."""
    plain, compiled = _filled(kernel, spec), _filled(kernel, spec)
    bound = torch_ops.Attention(kernel, compiled)
    q, k, v = (_random(spec, 9, heads, seed) for seed, heads in enumerate((4, 2, 2)))
    torch.testing.assert_close(torch.compile(bound, fullgraph=True, backend="aot_eager")(q, k, v), kernel.decode(q, k, v, plain))
    torch.testing.assert_close(bound.attend(q)[0], kernel.attend(q, plain))
    assert compiled.lengths.tolist() == [TOKENS + 9] * BATCH


def test_a_model_may_be_moved_to_where_its_caches_are_and_nowhere_else(kernel, spec):
    cache = _filled(kernel, spec)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch_ops.Attention(kernel, cache))
    model.to("cpu", cache.k_residual.dtype)
    assert model[1].k_residual.data_ptr() == cache.k_residual.data_ptr()
    other = torch.bfloat16 if cache.k_residual.dtype == torch.float32 else torch.float32
    with pytest.raises(TypeError, match="k_residual stays .* on cpu, as the cache has it: make the Attention when the model has"):
        model.to(other)
    with pytest.raises(ValueError, match="q_len"):
        torch_ops.Attention(kernel, _filled(kernel, spec), q_len=0)


def test_wrong_tensors_are_refused_as_kernels_refuse_them():
    kernel = variant(spec_of())
    cache = kernel.new_cache(BATCH, CAPACITY)
    bound = torch_ops.Attention(kernel, cache)
    q, k, v = (x.half() for x in _step(kernel.spec, 3))
    longer = q.expand(BATCH, 3, *q.shape[2:])
    for given in (
        tuple(torch.cat([x, x[:1]]) for x in (q, k, v)),
        (q.bfloat16(), k, v),
        (q[:, :, :1], k, v),
        (q[0], k, v),
        (q, torch.cat([k, k], 1), v),
        (longer[:1], k, v),
    ):
        with pytest.raises(ValueError) as kernels:  # noqa: PT011 - compared below
            kernel.decode(*given, cache)
        with pytest.raises(ValueError) as operators:  # noqa: PT011
            bound(*given)
        assert str(operators.value) == str(kernels.value)
    with pytest.raises(ValueError, match="q must be"):
        bound.attend(q.bfloat16())
    step = torch.compile(bound, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="q must be"):
        step(q.bfloat16(), k, v)
    assert not cache.lengths.any()


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


def test_a_cache_that_shares_its_lengths_is_refused(kernel, spec):
    cache = kernel.new_cache(BATCH, CAPACITY)
    layers = [cache, kernel.new_cache(like=cache)]
    for layer in layers:
        with pytest.raises(ValueError, match="Attention would advance lengths that several caches share"):
            torch_ops.Attention(kernel, layer)
    assert cache.bound == 0


def test_a_step_without_room_is_told_over_its_own_cache_alone(kernel, spec):
    full, other = _filled(kernel, spec), _filled(kernel, spec)
    step, unaffected = torch_ops.Attention(kernel, full), torch_ops.Attention(kernel, other)
    full.sequences.overflow._number.value = 1  # what a GPU does where a step of the cache has no room
    unaffected(*_step(spec, 3))
    copy.deepcopy(step)(*_step(spec, 3))  # over other memory
    assert other.lengths.tolist() == [TOKENS + 1] * BATCH
    with pytest.raises(CacheMismatch, match="had no room"):
        step(*_step(spec, 3))
    assert full.lengths.tolist() == [TOKENS] * BATCH
    step(*_step(spec, 3))
    assert full.lengths.tolist() == [TOKENS + 1] * BATCH
