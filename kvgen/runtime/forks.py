"""Forked processes: which kernels still work in the child.

OpenMP's threads do not survive a fork: libgomp would wait for them forever at the next parallel loop of the child, kvgen's or torch's. The
pool is therefore released before Python forks, and parent and child each start a new one. If that fails, and for CUDA, which does not
support forks, a call in the child raises KvgenError. Forks by C libraries are not detected.
"""

from __future__ import annotations

import ctypes
import os
from typing import NoReturn, Protocol
from weakref import WeakSet

import torch

from kvgen.errors import KvgenError


class Watched(Protocol):
    """An object that is notified in a forked child."""

    def after_fork(self) -> None:
        """Called in the child, by its only thread."""


_watched: WeakSet[Watched] = WeakSet()
_threads_given_back = True
_OMP_PAUSE_SOFT = 1


def watch(thing: Watched) -> None:
    """Call `thing.after_fork` in every child that is forked while `thing` lives."""
    _watched.add(thing)


def broken(gpu: bool) -> str | None:
    """Why kernels that were loaded before the fork cannot run in this child; None if they can."""
    if gpu:
        used = torch.cuda._is_in_bad_fork()
        return (
            "CUDA was used before this process was forked, and its contexts do not survive that: start processes by spawn" if used else None
        )
    if _threads_given_back:
        return None
    return "this process was forked where OpenMP's threads could not be given back, and they do not survive that: start processes by spawn"


class Torn:
    """In place of a lock that another thread held when the process was forked."""

    def __enter__(self) -> NoReturn:
        raise KvgenError("this process was forked while another thread was in a call over this cache: the cache is unusable here")

    def __exit__(self, *_: object) -> None: ...

    def locked(self) -> bool:
        """It is held forever."""
        return True


def give_threads_back() -> bool:
    """End the OpenMP threads of this thread; the next parallel loop starts new ones. Whether none are left that a fork would lose."""
    try:
        library = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return True  # not loaded, so no loop ran
    pause = getattr(library, "omp_pause_resource_all", None)
    return pause is not None and pause(_OMP_PAUSE_SOFT) == 0


def _before() -> None:
    global _threads_given_back
    _threads_given_back = give_threads_back()


def _in_child() -> None:
    for thing in list(_watched):
        thing.after_fork()


os.register_at_fork(before=_before, after_in_child=_in_child)
