from __future__ import annotations

import resource
import threading
from typing import Any

import pytest
from kvgen.measure.allowance import Allowance

from kvgen.lower.base import FUNCTIONS
from kvgen.runtime.module import Module, load
from tests.support.naive import naive_artifact

MIB = 1 << 20


def limit() -> int:
    return resource.getrlimit(resource.RLIMIT_DATA)[0]


def test_the_limit_binds_inside_and_not_outside() -> None:
    before, allowance = limit(), Allowance(64 * MIB)
    own = bytearray(256 * MIB)
    with pytest.raises(MemoryError), allowance:
        bytearray(1 << 40)
    assert limit() == before
    own += bytearray(256 * MIB)
    with allowance:
        assert limit() != before
        kept = bytearray(16 * MIB)
    assert limit() == before
    assert len(own) + len(kept) == 528 * MIB


def test_what_calls_keep_adds_up_and_what_they_free_is_given_back() -> None:
    allowance, kept = Allowance(256 * MIB), []
    for _ in range(3):
        with allowance:
            kept.append(bytearray(64 * MIB))
    assert 0 < allowance.left < 72 * MIB
    with allowance:
        kept.clear()
    assert 240 * MIB < allowance.left <= 256 * MIB


def test_memory_of_kvgen_is_not_counted() -> None:
    allowance = Allowance(64 * MIB)
    with allowance:
        pass
    own = bytearray(128 * MIB)
    with allowance:
        pass
    assert allowance.left > 56 * MIB
    del own


def test_stacks_of_threads_are_not_counted() -> None:
    """A pool of threads, kept, whose stacks together are larger than the limit."""
    done, stack = threading.Event(), threading.stack_size(resource_stack())
    try:
        allowance, started = Allowance(32 * MIB), []
        with allowance:
            for _ in range(8):
                started.append(threading.Thread(target=done.wait))
                started[-1].start()
        assert allowance.left > 16 * MIB
    finally:
        done.set()
        threading.stack_size(stack)
        for thread in started:
            thread.join()


def resource_stack() -> int:
    """The stack that a thread of a C++ module has, which Python's need not have."""
    from kvgen.measure.allowance import _stack_bytes

    return _stack_bytes()


def test_stretches_are_told_and_nested_ones_are_not() -> None:
    told: list[Any] = []
    allowance = Allowance(64 * MIB, told.append)
    with allowance, allowance:
        pass
    begun, ended = told
    assert begun["left"] == 64 * MIB
    assert begun["resident"] > MIB
    assert ended is None


def test_where_the_system_is_not_to_enforce_it_the_limit_is_only_told() -> None:
    before, told = limit(), []
    allowance = Allowance(64 * MIB, told.append, bound=False)
    with allowance:
        assert limit() == before
        kept = bytearray(b"1") * (128 * MIB)
    assert told[0]["left"] == 64 * MIB
    assert allowance.left < 0
    del kept


def test_without_a_limit_nothing_happens() -> None:
    before, told = limit(), []
    with Allowance(None, told.append):
        assert limit() == before
    assert told == []


def test_every_call_of_a_guarded_module_is_counted() -> None:
    told: list[Any] = []
    module = Module.__new__(Module)
    for name in FUNCTIONS:
        setattr(module, name, lambda *args, name=name: len(told) % 2)
    module.set_threads = None
    guarded = Allowance(64 * MIB, told.append).guard(module)
    assert [getattr(guarded, name)() for name in FUNCTIONS] == [1] * len(FUNCTIONS)
    assert len(told) == 2 * len(FUNCTIONS)
    assert module.attend() == 0


def test_a_workspace_counts_as_the_candidates() -> None:
    module = load(naive_artifact("greed").path)
    with pytest.raises(MemoryError, match=r"its workspace takes 1048576 MiB, and 64 MiB are left"):
        Allowance(64 * MIB).guard(module).workspace_bytes(1, 100, 1)
    assert Allowance(64 * MIB, bound=False).guard(module).workspace_bytes(1, 100, 1) == 1 << 40
    assert Allowance().guard(module).workspace_bytes(1, 100, 1) == 1 << 40
