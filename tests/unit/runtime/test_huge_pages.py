"""Memory of caches on the CPU: where it begins, what it costs, and what happens without huge pages."""

from __future__ import annotations

import errno
import gc
import mmap

import pytest
import torch

from kvgen.measure.memory import data_bytes, resident_bytes
from kvgen.runtime.huge_pages import HUGE, LEAST_BYTES, new_bytes
from tests.support.kernel_cases import KernelCase, variant

CPU = torch.device("cpu")


def usable(memory: torch.Tensor, count: int) -> bool:
    memory.fill_(7)
    return memory.shape == (count,) and memory.dtype == torch.uint8 and int(memory[-1]) == 7


@pytest.mark.parametrize("count", [0, 1, LEAST_BYTES - 1, LEAST_BYTES, LEAST_BYTES + 1, 3 * HUGE + 12345])
def test_memory_has_the_size_asked_for(count: int) -> None:
    memory = new_bytes(count, CPU)
    assert memory.shape == (count,)
    assert count == 0 or usable(memory, count)
    assert count < LEAST_BYTES or memory.data_ptr() % HUGE == 0
    assert memory.untyped_storage().nbytes() == count


def test_memory_is_neither_resident_before_it_is_written_nor_kept_after_it_is_freed() -> None:
    count = 256 << 20
    resident, mapped = resident_bytes(), data_bytes()
    memory = new_bytes(count, CPU)
    assert data_bytes() - mapped >= count
    assert resident_bytes() - resident < count // 8
    view = memory[:HUGE].view(torch.int64)
    view.fill_(1)
    del memory
    gc.collect()
    assert int(view.sum()) == HUGE // 8  # a view keeps the memory
    del view
    gc.collect()
    assert data_bytes() - mapped < count // 8


ADVICE: list[tuple[int, ...]] = []


class Recorded(mmap.mmap):
    def madvise(self, *advice: int) -> None:
        ADVICE.append(advice)


class SmallPages(mmap.mmap):
    def madvise(self, *_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


class NoMemory(mmap.mmap):
    def __new__(cls, *_: object, **__: object) -> NoMemory:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_huge_pages_are_asked_for_whole_ones_within_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", Recorded)
    ADVICE.clear()
    memory = new_bytes(3 * HUGE + 12345, CPU)
    ((advice, start, length),) = ADVICE
    assert (advice, length) == (mmap.MADV_HUGEPAGE, 3 * HUGE)
    assert 0 <= start < HUGE
    assert memory.data_ptr() % HUGE == 0


def test_without_huge_pages_the_memory_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", SmallPages)
    assert usable(new_bytes(LEAST_BYTES, CPU), LEAST_BYTES)
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert usable(new_bytes(LEAST_BYTES, CPU), LEAST_BYTES)


def test_too_little_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", NoMemory)
    with pytest.raises(MemoryError, match=f"there are no {LEAST_BYTES} bytes of memory: Cannot allocate memory"):
        new_bytes(LEAST_BYTES, CPU)


def test_a_cache_begins_at_a_huge_page() -> None:
    v = variant(KernelCase("k4v4", "default", "cpu", "cpu"))
    cache = v.new_cache(4, 8192, "cpu")
    assert cache.packed.nbytes > LEAST_BYTES
    assert cache.packed.data_ptr() % HUGE == 0
    assert cache.packed.is_contiguous()
