"""GPU tests: skipped where there is no device; what the selected ones need is compiled while the first of them run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from tests.support.kernel_cases import Compilation, KernelCase

HERE = Path(__file__).parent
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""torch reads it at the first product of a process, and refuses deterministic training without it from then on."""
COMPILATION = pytest.StashKey[Compilation]()
WORKER_BYTES = 10 << 30
"""Of the GPU's memory, what a worker takes at most: a test's caches, their references in fp64, the context."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """`-n auto`: a worker for each processor, as far as the GPU's memory holds them."""
    if not torch.cuda.is_available():
        return None
    return max(1, min(len(os.sched_getaffinity(0)), torch.cuda.mem_get_info()[1] // WORKER_BYTES))


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    """Workers side by side share the device's memory: what a test has freed is given back."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture
def most_of_the_memory() -> Iterator[None]:
    """For tests that take dozens of GiB: one at a time on a machine."""
    with FileLock(Path(tempfile.gettempdir()) / f"kvgen-{os.getuid()}-most-of-the-memory.lock"):
        yield
        torch.cuda.empty_cache()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies here as `gpu`, and skip it without a device."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin to compile the cases that the selected tests take as parameters, in the order of the tests."""
    if not torch.cuda.is_available() or session.config.option.collectonly:
        return
    found = [value for item in session.items for value in getattr(getattr(item, "callspec", None), "params", {}).values()]
    session.stash[COMPILATION] = Compilation(value for value in found if isinstance(value, KernelCase))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Drop what has not begun."""
    compilation = session.stash.get(COMPILATION, None)
    if compilation is not None:
        compilation.close()
