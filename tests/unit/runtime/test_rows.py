"""One sequence of a batch as a cache of its own, sequences that change places, chunks that all layers share."""

from __future__ import annotations

import copy
import ctypes
import pickle
from collections.abc import Callable

import pytest
import torch

from kvgen.errors import CacheMismatch
from kvgen.runtime.calls import Variant
from kvgen.runtime.kvcache import KVCache, row_of
from tests.support.cpu import spec_of
from tests.support.cpu import variant as compiled

BATCH, DIM = 3, 64


@pytest.fixture(scope="module")
def variant() -> Variant:
    return compiled(spec_of())


@pytest.fixture(scope="module")
def paged() -> Variant:
    return compiled(spec_of(page=64, q_len=4))


def random(batch: int, tokens: int, heads: int, seed: int) -> torch.Tensor:
    return torch.randn(batch, tokens, heads, DIM, generator=torch.Generator().manual_seed(seed)).half()


def filled(variant: Variant, lengths: list[int]) -> list[KVCache]:
    first = variant.new_cache(BATCH, 256)
    caches = [first, variant.new_cache(like=first)]
    for number, cache in enumerate(caches):
        variant.prefill(cache, random(BATCH, 100, 2, number), random(BATCH, 100, 2, 10 + number), lengths, advance=False)
    first.advance(lengths)
    return caches


def held(variant: Variant, cache: KVCache, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = variant.unpack(cache)
    return k[row, : cache.lengths[row]].clone(), v[row, : cache.lengths[row]].clone()


@pytest.mark.parametrize("fixture", ["variant", "paged"])
def test_a_row_appends_to_its_batch_and_to_nothing_else(fixture: str, request: pytest.FixtureRequest) -> None:
    kernel: Variant = request.getfixturevalue(fixture)
    caches, alone = filled(kernel, [100, 7, 40]), kernel.new_cache(1, 256)
    kernel.prefill(alone, random(BATCH, 100, 2, 0)[1:2, :7], random(BATCH, 100, 2, 10)[1:2, :7])
    others = [held(kernel, caches[0], row) for row in (0, 2)]
    rows = row_of(caches, 1)
    q, k, v = random(1, 50, 4, 1), random(1, 50, 2, 2), random(1, 50, 2, 3)
    outs = [kernel.decode(q, k, v, row, advance=False) for row in rows]
    rows[0].advance(50)
    assert torch.equal(outs[0], kernel.decode(q, k, v, alone))
    assert caches[0].lengths.tolist() == [100, 57, 40]
    assert caches[0].bound == 100
    assert not caches[0].sequences.uniform
    assert all(torch.equal(a, b) for a, b in zip(held(kernel, caches[0], 1), held(kernel, alone, 0), strict=True))
    for row, before in zip((0, 2), others, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(held(kernel, caches[0], row), before, strict=True))
    plan = kernel.plan(caches[0])
    rows[0].reset([0])
    with pytest.raises(ValueError, match="before lengths changed"):
        kernel.decode(random(BATCH, 1, 4, 0), random(BATCH, 1, 2, 0), random(BATCH, 1, 2, 0), caches[0], plan=plan)
    assert caches[0].lengths.tolist() == [100, 0, 40]


def test_sequences_change_places_in_every_layer(variant: Variant) -> None:
    caches = filled(variant, [100, 7, 40])
    before = [[held(variant, cache, row) for row in range(BATCH)] for cache in caches]
    plan = variant.plan(caches[0])
    caches[1].reorder([2, 0, 0])
    assert caches[0].lengths.tolist() == [40, 100, 100]
    for cache, rows in zip(caches, before, strict=True):
        for row, source in enumerate((2, 0, 0)):
            assert all(torch.equal(a, b) for a, b in zip(held(variant, cache, row), rows[source], strict=True))
    with pytest.raises(ValueError, match="before lengths changed"):
        variant.decode(random(BATCH, 1, 4, 0), random(BATCH, 1, 2, 0), random(BATCH, 1, 2, 0), caches[0], plan=plan)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda caches: pickle.loads(pickle.dumps(caches))], ids=["deepcopy", "pickle"])
def test_caches_that_are_copied_together_share_their_sequences(copied: Callable[[list[KVCache]], list[KVCache]], variant: Variant) -> None:
    caches = filled(variant, [100, 7, 40])
    before = [held(variant, cache, 1) for cache in caches]
    others = copied(caches)
    with pytest.raises(ValueError, match="several caches share"):
        variant.prefill(others[0], random(BATCH, 1, 2, 0), random(BATCH, 1, 2, 0))
    others[0].reorder([1, 1, 1])
    assert (caches[0].lengths.tolist(), others[1].lengths.tolist()) == ([100, 7, 40], [7, 7, 7])
    for cache, source in zip(others, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(held(variant, cache, 0), source, strict=True))


def test_a_refused_crop_that_a_row_reports_is_counted_for_its_batch() -> None:
    kernel = compiled(spec_of(cache={"rollback": 6}))
    cache = kernel.new_cache(BATCH, 256)
    kernel.prefill(cache, random(BATCH, 60, 2, 0), random(BATCH, 60, 2, 1))
    cache.sequences.appended(55)  # as of a crop of 5, which a GPU refuses later
    (row,) = row_of([cache], 0)
    ctypes.c_int32.from_address(cache.sequences.cropped.address).value = 1
    with pytest.raises(CacheMismatch, match="took back more tokens"):
        row.advance(1)
    assert cache.bound >= 60
    assert not cache.sequences.uniform


def test_sequences_that_grow_by_turns_fill_the_cache(variant: Variant) -> None:
    """The host's bound, 200 + 150, is beyond max_len, and no sequence is."""
    first = variant.new_cache(BATCH, 256)
    caches = [first, variant.new_cache(like=first)]
    for counts in ([200, 50, 0], [50, 150, 256]):
        for cache in caches:
            for row, count in enumerate(counts):
                if count:
                    variant.prefill(*row_of([cache], row), random(1, count, 2, 0), random(1, count, 2, 1), advance=False)
        first.advance(counts)
    assert first.lengths.tolist() == [250, 200, 256]
    with pytest.raises(CacheMismatch, match="256 tokens per sequence, and 257 could be needed"):
        first.advance([6, 6, 1])
    first.reset([2])
    first.advance(6)
    assert first.lengths.tolist() == [256, 206, 0]
    first.reorder([1, 1, 1])
    first.advance(50)
    assert first.lengths.tolist() == [256, 256, 256]
