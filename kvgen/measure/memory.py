"""How much host memory a candidate may allocate, counted only while its own code runs.

The process of a candidate also contains memory of kvgen: caches, inputs, reference results, read buffers. The limit therefore applies only
inside `with allowance:`, around the candidate's code. There, RLIMIT_DATA is set to the memory that is already mapped plus the rest of the
allowance, so an allocation beyond it fails. Memory that the candidate keeps when it returns is deducted, so leaks of many calls add up.
RLIMIT_DATA counts private writable memory. RLIMIT_AS would also count reservations: 64 MiB for the malloc arena of every thread.

CUDA maps far more memory than it uses: on a GPU there is no such limit, and the parent process watches the memory of the whole worker.
"""

from __future__ import annotations

import copy
import os
import resource
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from kvgen._machine import cores
from kvgen.runtime.module import Functions, Module

F = TypeVar("F", bound=Functions)
PAGE = os.sysconf("SC_PAGE_SIZE")
DEFAULT_STACK = 8 << 20
ARENA = 1 << 20
"""Bytes that malloc maps for a thread that allocates little."""


class Allowance:
    """Host memory that one candidate may allocate. `with allowance:` encloses its code, and may be nested."""

    def __init__(self, nbytes: int | None = None) -> None:
        """At most `nbytes`; None: no limit."""
        self.nbytes = nbytes
        self.left = nbytes or 0
        self._depth = 0

    def __enter__(self) -> Allowance:
        self._depth += 1
        if self.nbytes is not None and self._depth == 1:
            self._threads, self._data, self._limits = threads(), data_bytes(), resource.getrlimit(resource.RLIMIT_DATA)
            most = self._data + max(0, self.left) + _most_threads() * (stack_bytes() + ARENA)
            given = [limit for limit in self._limits if limit != resource.RLIM_INFINITY]
            resource.setrlimit(resource.RLIMIT_DATA, (min(most, *given), self._limits[1]) if given else (most, self._limits[1]))
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self.nbytes is not None and self._depth == 0:
            resource.setrlimit(resource.RLIMIT_DATA, self._limits)
            kept = data_bytes() - self._data - max(0, threads() - self._threads) * stack_bytes()
            self.left = min(self.nbytes, self.left - kept)

    def guard(self, module: F) -> F:
        """The module with every call inside the allowance; workspaces count as the candidate's.

        For calls that are not timed: entering and leaving takes some 50 µs.
        """
        if self.nbytes is None:
            return module
        guarded = copy.copy(module)
        for name in module.names:
            setattr(guarded, name, self._guarded(getattr(module, name)))
        if isinstance(guarded, Module):
            guarded.workspace_bytes = self._workspace(guarded.workspace_bytes)
        return guarded

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function, assigned=())
        def call(*args: Any) -> Any:
            with self:
                return function(*args)

        return call

    def _workspace(self, workspace_bytes: Callable[..., Any]) -> Callable[..., Any]:
        """kvgen allocates workspaces, but the candidate determines their size."""

        def call(*args: Any) -> Any:
            size = int(workspace_bytes(*args))
            if size > self.left:
                raise MemoryError(f"its workspace takes {size >> 20} MiB, and {max(0, self.left) >> 20} MiB are left for it")
            return size

        return call


def resident_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process without pages of files, of which a library brings many when it is first used; 0 for one that ended."""
    _, resident, shared, *_ = _statm(pid)
    return (resident - shared) * PAGE


def data_bytes() -> int:
    """Private writable memory that this process has mapped, touched or not: the quantity that RLIMIT_DATA limits."""
    return _statm("self")[5] * PAGE


def threads() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


def stack_bytes() -> int:
    """Bytes that a thread maps for its stack. Most are never touched, so they do not count as resident memory."""
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return DEFAULT_STACK if stack == resource.RLIM_INFINITY else stack


def _most_threads() -> int:
    """Threads that a candidate and torch may start on this machine: a pool each."""
    import torch

    return 2 * max(cores(), len(os.sched_getaffinity(0)), torch.get_num_threads())


def _statm(pid: int | str) -> list[int]:
    """Pages: size, resident, shared, text, lib, data, dirty."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/statm").read_text().split()]
    except OSError:
        return [0] * 7
