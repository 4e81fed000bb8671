"""A kernel on tensors: right numbers, one cache for several launches, refusals."""

from __future__ import annotations

from copy import copy

import pytest
import torch

import kvgen
from kvgen.registry.store import Store
from kvgen.spec import Workload
from kvgen.spec.dispatch import Tiling
from tests.unit.api.conftest import WithNaive, naive_entry, wanting

BATCH, TOKENS = 2, 70


def _tensors(spec, tokens, heads=None, seed=0):
    torch.manual_seed(seed)
    attention = spec.attention
    return torch.randn(BATCH, tokens, heads or attention.kv_heads, attention.head_dim)


def _expected(q, k, v, group):
    """Causal attention of the last positions, in fp64."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    rows, columns = scores.shape[-2:]
    mask = torch.arange(columns) > torch.arange(columns - rows, columns).unsqueeze(1)
    scores = scores.masked_fill(mask, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


def test_launches_share_a_cache_and_are_chosen_by_length(places, spec):
    wide = wanting(spec, (2, 32), (2, 4096))
    Store(places).put(naive_entry(wide, variants=2))
    kernel = kvgen.get_kernel(wide)
    short, long = (kernel.variant(Workload(batch=2, kv_len=length)) for length in (32, 4096))
    assert short is not long
    assert kernel.variant(Workload(batch=2, kv_len=200)) is short
    assert kernel.variant(Workload(batch=2, kv_len=500)) is long
    assert kernel.launch("2x4096") is kernel.launch(Workload(batch=2, kv_len=4096)) is not kernel.launch("2x32")
    with pytest.raises(ValueError, match="'big' is not a workload; write batch x tokens"):
        kernel.launch("big")
    with pytest.raises(ValueError, match="at least 1"):
        kernel.set_threads(0)

    called = []
    for name, variant in (("short", short), ("long", long)):
        module = variant.executable.module = copy(variant.module)
        module.attend = lambda *args, _real=module.attend, _name=name: (called.append(_name), _real(*args))[1]
    cache = kernel.new_cache(BATCH, 4096)
    assert len(cache.sequences.workspaces) == 2
    k, v = _tensors(spec, 1500), _tensors(spec, 1500, seed=1)
    q = _tensors(spec, 1, spec.attention.q_heads, seed=2)
    kernel.prefill(cache, k[:, :40], v[:, :40])
    kernel.attend(q, cache)
    kernel.prefill(cache, k[:, 40:], v[:, 40:])
    out = kernel.attend(q, cache)
    assert called == ["short", "long"]
    torch.testing.assert_close(out.double(), _expected(q, k, v, spec.attention.group)[0], rtol=1e-5, atol=1e-5)


SMALL = Tiling(1, 8, 1, 64, 1024, 0.6, most_waves=1, most_splits=1)
LARGE = Tiling(1, 1, 1, 64, 1024, 0.1)
"""Of naive launches: the one of more CTAs is faster where a plan spreads unequal lengths."""


def test_what_the_host_knows_decides_about_the_launch(places, spec, monkeypatch):
    wide = wanting(spec, (2, 32), (2, 4096))
    Store(places).put(naive_entry(wide, variants=2))
    monkeypatch.setattr(WithNaive, "tiling", lambda *given: (SMALL, LARGE)[given[2].launch["naive"]], raising=False)
    kernel = kvgen.get_kernel(wide)
    planned, static = kernel._launches
    cache = kernel.new_cache(BATCH, 1 << 16)
    k = _tensors(spec, 500)
    kernel.prefill(cache, k, k)
    assert kernel.plan(cache).launch is static
    assert kernel.plan(cache, uniform=False).launch is planned, "a promise decides, not what the host happens to know"
    cache.sequences.uniform = False
    assert kernel.plan(cache).launch is planned
    assert kernel.plan(cache, uniform=True).launch is static
    with pytest.raises(ValueError, match="tokens"):
        kernel.plan(cache, tokens=-1)
