"""Steps over shared lengths: one plan for all layers, lengths that advance once, sequences that are emptied, steps without room."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from kvgen.errors import CacheMismatch
from kvgen.runtime.calls import Variant
from kvgen.runtime.kvcache import KVCache, row_of
from kvgen.runtime.sequences import Sequences
from tests.support.cpu import spec_of
from tests.support.cpu import variant as compiled

LAYERS, BATCH = 3, 3


@pytest.fixture(scope="module")
def variant() -> Variant:
    return compiled(spec_of(heads="4/2", dim=32, q_len=2))


def random(tokens: int, heads: int, seed: int) -> torch.Tensor:
    return torch.randn(BATCH, tokens, heads, 32, generator=torch.Generator().manual_seed(seed)).half()


def layers(variant: Variant, max_len: int = 512) -> list[KVCache]:
    first = variant.new_cache(BATCH, max_len)
    return [first, *(variant.new_cache(like=first) for _ in range(LAYERS - 1))]


def prefilled(variant: Variant, lengths: list[int], max_len: int = 512) -> list[KVCache]:
    caches = layers(variant, max_len)
    for number, cache in enumerate(caches):
        variant.prefill(cache, random(300, 2, number), random(300, 2, 10 + number), lengths, advance=False)
    assert caches[0].lengths.tolist() == [0] * BATCH
    caches[0].advance(lengths)
    return caches


def test_a_step_over_all_layers_gives_what_each_gives_alone(variant: Variant) -> None:
    lengths = [300, 7, 130]
    caches = prefilled(variant, lengths)
    alone = []
    for number in range(LAYERS):
        cache = variant.new_cache(BATCH, 512)
        variant.prefill(cache, random(300, 2, number), random(300, 2, 10 + number), lengths)
        alone.append(cache)
    for step in range(40):
        q, k, v = random(1, 4, 100 + step), random(1, 2, 200 + step), random(1, 2, 300 + step)
        plan = variant.plan(caches[0])
        outs = [variant.decode(q, k, v, cache, lse=True, plan=plan) for cache in caches]
        caches[0].advance(1)
        for (out, lse), cache in zip(outs, alone, strict=True):
            want = variant.decode(q, k, v, cache, lse=True)
            assert torch.equal(out, want[0])
            assert torch.equal(lse, want[1])
    assert all(cache.lengths is caches[0].lengths for cache in caches)
    assert caches[0].lengths.tolist() == alone[0].lengths.tolist() == [340, 47, 170]
    assert caches[1].bound == 340
    for mine, other in zip(caches, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(variant.unpack(mine), variant.unpack(other), strict=True))


def test_layers_share_a_chunk_of_a_prompt_also_where_sequences_are_empty(variant: Variant) -> None:
    """As the error for too many query tokens says: a number would leave empty sequences empty."""
    caches, q, new = layers(variant), random(40, 4, 1), random(40, 2, 2)
    with pytest.raises(ValueError, match=r"cache.advance\(\[40\] \* batch\)"):
        variant.plan(caches[0], 40)
    for cache in caches:
        variant.decode(q, new, new, cache, advance=False)
    caches[0].advance([40] * BATCH)
    assert caches[0].lengths.tolist() == [40] * BATCH
    torch.testing.assert_close(variant.unpack(caches[1])[0].float(), new.float(), atol=0.5, rtol=0)


def test_calls_that_would_advance_shared_lengths_are_refused(variant: Variant) -> None:
    caches = prefilled(variant, [5, 6, 7])
    new = random(1, 2, 1)
    with pytest.raises(ValueError, match="decode would advance lengths that several caches share"):
        variant.decode(random(1, 4, 0), new, new, caches[1])
    with pytest.raises(ValueError, match="prefill would advance lengths that several caches share"):
        variant.prefill(caches[1], new, new)
    assert caches[0].lengths.tolist() == [5, 6, 7]


def test_a_plan_is_of_one_step(variant: Variant) -> None:
    caches, q, new = prefilled(variant, [5, 6, 7]), random(1, 4, 0), random(1, 2, 1)
    plan = variant.plan(caches[0])
    other = variant.new_cache(BATCH, 512)
    sibling = Variant(variant.spec, variant.layout, variant.module)
    for call, match in (
        (lambda: variant.decode(q, new, new, other, plan=plan), "another cache"),
        (lambda: sibling.decode(q, new, new, caches[0], plan=plan), "another kernel"),
        (lambda: variant.attend(q, caches[0], plan=plan), "for decode with 1 query tokens, and the call is attend with 1"),
        (lambda: variant.attend(random(2, 4, 0), caches[0], plan=variant.plan(caches[0], append=False)), "the call is attend with 2"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    variant.decode(q, new, new, caches[0], plan=plan)
    caches[0].advance(1)
    with pytest.raises(ValueError, match="before lengths changed"):
        variant.decode(q, new, new, caches[0], plan=plan)


def test_an_empty_sequence_takes_no_part_until_it_is_filled(variant: Variant) -> None:
    caches = prefilled(variant, [40, 50, 60])
    caches[0].reset([1])
    assert caches[2].lengths.tolist() == [40, 0, 60]
    q, new = random(1, 4, 0), random(1, 2, 1)
    out, lse = variant.attend(q, caches[0], lse=True)
    assert not out[1].any()
    assert (lse[1] == -torch.inf).all()
    before = caches[0].k_residual[1].clone()
    out, lse = variant.decode(q, new, new, caches[0], lse=True, plan=variant.plan(caches[0]))
    assert not out[1].any()
    assert (lse[1] == -torch.inf).all()
    assert torch.equal(caches[0].k_residual[1].view(torch.int16), before.view(torch.int16))
    caches[0].advance(1)
    assert caches[0].lengths.tolist() == [41, 0, 61]
    for number, cache in enumerate(caches):
        variant.prefill(cache, random(9, 2, number), random(9, 2, number), [0, 9, 0], advance=False)
    caches[0].advance([0, 9, 0])
    assert caches[0].lengths.tolist() == [41, 9, 61]
    variant.decode(q, new, new, caches[0], plan=variant.plan(caches[0]))


def test_a_step_without_room_changes_nothing(variant: Variant) -> None:
    caches = prefilled(variant, [64, 6, 7], max_len=64)
    before = [cache.packed.clone() for cache in caches], [cache.k_residual.clone() for cache in caches]
    with pytest.raises(CacheMismatch, match="holds max_len=64 tokens"):
        variant.plan(caches[0])
    with pytest.raises(CacheMismatch):
        caches[0].advance(1)
    with pytest.raises(ValueError, match="64"):  # the module's own check, which a captured call has alone
        variant.module.advance(caches[0].lengths, None, 1, 64, caches[0].sequences.overflow.address)
    assert caches[0].lengths.tolist() == [64, 6, 7]
    assert all(torch.equal(a, cache.packed) for a, cache in zip(before[0], caches, strict=True))


def refuse(cache: KVCache) -> None:
    """Set the flag that a replay sets."""
    ctypes.c_int32.from_address(cache.sequences.overflow.address).value = 1


EVERY = (KVCache.clear, lambda cache: cache.reset([2, 0, 1]))
SOME = (lambda cache: cache.reset([0, 2]), lambda cache: cache.reset([]), lambda cache: row_of([cache], 1)[0].clear())


@pytest.mark.parametrize("forget", EVERY, ids=["clear", "list"])
def test_a_reset_of_all_sequences_forgets_that_one_was_full(variant: Variant, forget: Callable[[KVCache], None]) -> None:
    cache = prefilled(variant, [9, 9, 9])[0]
    refuse(cache)
    forget(cache)
    variant.attend(random(1, 4, 0), cache)
    refuse(cache)
    with pytest.raises(CacheMismatch, match="had no room"):
        variant.attend(random(1, 4, 0), cache)


@pytest.mark.parametrize("forget", SOME, ids=["rows", "none", "row"])
def test_a_reset_of_some_sequences_keeps_what_may_be_of_others(variant: Variant, forget: Callable[[KVCache], None]) -> None:
    cache = prefilled(variant, [9, 9, 9])[0]
    refuse(cache)
    forget(cache)
    with pytest.raises(CacheMismatch, match="had no room"):
        variant.attend(random(1, 4, 0), cache)


def captured(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Sequences, "capturing", True)
        call()


def test_a_captured_reset_leaves_lengths_unknown_for_good(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph may be replayed after a clear, and makes equal lengths unequal then."""
    cache = prefilled(variant, [9, 9, 9])[0]
    captured(monkeypatch, lambda: cache.reset([0]))
    assert cache.bound == cache.max_len
    cache.clear()
    assert not cache.sequences.uniform
    assert cache.bound == cache.max_len


# --- tokens that are taken back --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def croppable() -> Variant:
    return compiled(spec_of(heads="4/2", dim=32, q_len=2, cache={"rollback": 6}))


def test_a_crop_is_of_all_layers_and_ends_a_plan(croppable: Variant) -> None:
    caches = prefilled(croppable, [40, 0, 130])
    q, new = random(1, 4, 0), random(1, 2, 1)
    plan = croppable.plan(caches[0])
    caches[1].crop(4)
    assert caches[0].lengths.tolist() == [36, 0, 126]  # an empty sequence stays as it is
    assert caches[0].bound == 126
    with pytest.raises(ValueError, match="before lengths changed"):
        croppable.decode(q, new, new, caches[0], plan=plan)
    caches[0].advance([1, 1, 2])
    caches[0].crop(torch.tensor([3, 1, 0], dtype=torch.int32))
    assert caches[2].lengths.tolist() == [34, 0, 128]
    caches[0].reset([0])
    caches[0].advance([5, 0, 0])
    caches[0].crop([5, 0, 0])  # a sequence that was emptied has no longer past
    assert caches[0].lengths.tolist() == [0, 0, 128]


@pytest.mark.parametrize(
    ("tokens", "error", "match"),
    [
        (7, ValueError, r"tokens \(7\) must be at most 6"),
        (True, TypeError, "must be a whole number, not True"),
        ([1, 2, 7], ValueError, r"tokens must lie in 0..6, cache.rollback of the spec, not in 1..7"),
        ([1, 2], ValueError, r"tokens must have shape \[3\], not \[2\]"),
        (torch.ones(3), TypeError, "tokens must be whole numbers, not float32"),
        ([0, 1, 0], ValueError, "sequence 1 has 0 tokens, of which 0 can be taken back, not 1"),
    ],
)
def test_a_wrong_crop_changes_nothing(croppable: Variant, tokens: object, error: type[Exception], match: str) -> None:
    caches = prefilled(croppable, [40, 0, 3])
    with pytest.raises(error, match=match):
        caches[0].crop(tokens)  # type: ignore[arg-type]
    assert caches[0].lengths.tolist() == [40, 0, 3]
    caches[0].crop([6, 0, 3])


def test_crops_without_new_tokens_between_them_count_together(croppable: Variant) -> None:
    cache = prefilled(croppable, [40, 50, 60])[0]
    cache.crop(4)
    with pytest.raises(ValueError, match="sequence 0 has 36 tokens, of which 2 can be taken back, not 3"):
        cache.crop(3)
    cache.advance(1)
    cache.crop(3)
    assert cache.lengths.tolist() == [34, 44, 54]


def test_a_cache_without_rollback_refuses_crops_and_layers_with_one(variant: Variant, croppable: Variant) -> None:
    cache = prefilled(variant, [40, 50, 60])[0]
    with pytest.raises(ValueError, match=r"cannot be cropped: its spec has no cache.rollback"):
        cache.crop(1)
    with pytest.raises(CacheMismatch, match=r"one cache.rollback, not 0 and 6"):
        croppable.new_cache(like=cache)
