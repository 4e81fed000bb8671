"""How much host memory a candidate may allocate, counted only while its own code runs.

The process of a candidate also contains memory of kvgen: caches, inputs, reference results, read buffers. The limit therefore applies only
inside `with allowance:`, around the candidate's code. There, RLIMIT_DATA is set to the memory that is already mapped plus the rest of the
allowance, so an allocation beyond it fails. Memory that the candidate keeps when it returns is deducted, so leaks of many calls add up.
RLIMIT_DATA counts private writable memory. RLIMIT_AS would also count reservations: 64 MiB for the malloc arena of every thread.

CUDA maps far more memory than it uses. On a GPU RLIMIT_DATA is therefore not changed; instead the parent process, which is notified of
every stretch of candidate code, watches resident memory (`kvgen.measure.watch`).
"""

from __future__ import annotations

import copy
import os
import resource
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from kvgen._machine import cores
from kvgen.measure.memory import data_bytes, resident_bytes, threads
from kvgen.runtime.module import Functions, Module

F = TypeVar("F", bound=Functions)
Tell = Callable[["Stretch | None"], None]
"""Called with the candidate's stretch when its code begins to run, and with None when it ends."""
Stretch = dict[str, int]
"""`resident`: resident bytes when the candidate's code began to run; `left`: bytes that it may allocate beyond those."""
UNLIMITED = resource.RLIM_INFINITY
DEFAULT_STACK = 8 << 20
ARENA = 1 << 20
"""Bytes that malloc maps for a thread that allocates little."""


class Allowance:
    """Host memory that one candidate may allocate. `with allowance:` encloses its code, and may be nested."""

    def __init__(self, nbytes: int | None = None, tell: Tell | None = None, *, bound: bool = True) -> None:
        """At most `nbytes` (None: no limit). `bound` sets RLIMIT_DATA; without it only `tell` learns of the limit."""
        self.nbytes = nbytes
        self.left = nbytes or 0
        self._bound = bound
        self._tell = tell or (lambda _: None)
        self._depth = 0

    def __enter__(self) -> Allowance:
        self._depth += 1
        if self.nbytes is not None and self._depth == 1:
            self._threads, self._data, self._resident = threads(), data_bytes(), resident_bytes()
            if self._bound:
                self._limits = resource.getrlimit(resource.RLIMIT_DATA)
                most = self._data + max(0, self.left) + _most_threads() * _thread_bytes()
                resource.setrlimit(resource.RLIMIT_DATA, (_least(most, *self._limits), self._limits[1]))
            self._tell({"resident": self._resident, "left": self.left})
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self.nbytes is not None and self._depth == 0:
            if self._bound:
                resource.setrlimit(resource.RLIMIT_DATA, self._limits)
            self.left = min(self.nbytes, self.left - self._kept())
            self._tell(None)

    def guard(self, module: F) -> F:
        """The module with every call inside the allowance; workspaces count as the candidate's.

        For calls that are not timed: entering and leaving takes some 50 µs.
        """
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
        """kvgen allocates workspaces, but the candidate determines their size. Workspaces on a GPU are not in host memory."""

        def call(*args: Any) -> Any:
            size = int(workspace_bytes(*args))
            if self._bound and self.nbytes is not None and size > self.left:
                raise MemoryError(f"its workspace takes {size >> 20} MiB, and {max(0, self.left) >> 20} MiB are left for it")
            return size

        return call

    def _kept(self) -> int:
        """Bytes that the stretch that ends now left allocated; negative if it freed memory of earlier stretches."""
        if not self._bound:
            return resident_bytes() - self._resident
        return data_bytes() - self._data - max(0, threads() - self._threads) * _stack_bytes()


def _least(*limits: int) -> int:
    return min((limit for limit in limits if limit != UNLIMITED), default=UNLIMITED)


def _most_threads() -> int:
    """Threads that a candidate and torch may start on this machine: a pool each."""
    import torch

    return 2 * max(cores(), len(os.sched_getaffinity(0)), torch.get_num_threads())


def _thread_bytes() -> int:
    """Bytes that each thread maps by itself. Most of a stack is never touched, so it does not count as resident memory."""
    return _stack_bytes() + ARENA


def _stack_bytes() -> int:
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return DEFAULT_STACK if stack == UNLIMITED else stack
