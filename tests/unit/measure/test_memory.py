from __future__ import annotations

import mmap
import resource
import threading
from pathlib import Path

import pytest

from kvgen.lower.backend import FUNCTIONS
from kvgen.measure.memory import Allowance, data_bytes, resident_bytes, stack_bytes
from kvgen.runtime.module import load
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
    with allowance, allowance:
        assert limit() != before
        kept = bytearray(16 * MIB)
    assert limit() == before
    assert len(own) + len(kept) == 528 * MIB
    with Allowance():
        assert limit() == before


def test_what_calls_keep_adds_up_and_what_they_free_is_given_back() -> None:
    allowance, kept = Allowance(256 * MIB), []
    for _ in range(3):
        with allowance:
            kept.append(bytearray(64 * MIB))
    own = bytearray(128 * MIB)
    assert 0 < allowance.left < 72 * MIB, "memory of kvgen is not counted"
    with allowance:
        kept.clear()
    assert 240 * MIB < allowance.left <= 256 * MIB
    del own


def test_stacks_of_threads_are_not_counted() -> None:
    """A pool of threads, kept, whose stacks together are larger than the limit."""
    done, stack = threading.Event(), threading.stack_size(stack_bytes())
    allowance, started = Allowance(32 * MIB), []
    try:
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


def test_every_call_of_a_guarded_module_is_counted_and_a_workspace_is_the_candidates() -> None:
    module, allowance = load(naive_artifact("greed").path), Allowance(64 * MIB)
    guarded = allowance.guard(module)
    assert all(getattr(guarded, name) is not getattr(module, name) for name in FUNCTIONS)
    with pytest.raises(MemoryError, match=r"its workspace takes 1048576 MiB, and 64 MiB are left"):
        guarded.workspace_bytes(1, 100, 1)
    assert Allowance().guard(module) is module


def test_memory_figures_are_of_a_process_without_pages_of_files(tmp_path: Path) -> None:
    before = data_bytes(), resident_bytes()
    kept = bytearray(64 << 20)
    assert data_bytes() - before[0] >= 60 << 20
    kept[:] = b"1" * len(kept)
    assert resident_bytes() - before[1] >= 60 << 20
    assert resident_bytes(0x7FFFFFFF) == 0
    file = tmp_path / "library"
    file.write_bytes(b"1" * (64 << 20))
    now = resident_bytes()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[::4096]) > 0
        assert resident_bytes() - now < 32 << 20
