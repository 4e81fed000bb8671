"""Garbage collection around imports."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from kvgen._collect import resting


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.enable()
    yield
    gc.unfreeze()
    if not enabled:
        gc.disable()


def test_what_was_allocated_meanwhile_starts_no_collection() -> None:
    before = [generation["collections"] for generation in gc.get_stats()]
    with resting():
        held = [[] for _ in range(100_000)]
    more = [[] for _ in range(100)]  # with the counts as they were, these would start a collection
    assert [generation["collections"] for generation in gc.get_stats()] == before
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert all(gc.is_tracked(one) for one in (held, more))


def test_what_a_program_froze_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with resting():
        pass
    assert gc.get_freeze_count() >= frozen - 100  # some objects end meanwhile


def test_collection_that_was_disabled_stays_so() -> None:
    gc.disable()
    with resting():
        pass
    assert not gc.isenabled()
