"""A compiled module as Python functions; `docs/abi.md` lists their arguments."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import tvm_ffi

from kvgen.arch import Target
from kvgen.errors import KvgenError
from kvgen.runtime import checks

F = TypeVar("F", bound="Functions")


class Functions:
    """The functions of a loaded shared library, bound once; the library stays loaded as long as this object lives."""

    set_threads: Callable[[int], Any] | None
    """None for a GPU: only CPU modules have threads."""
    write: Callable[..., Any] | None
    """Of formats whose tokens are quantized as they arrive."""
    expand: Callable[..., Any] | None
    """Of a linear layer on a GPU: its weight in 16 bits."""

    def __init__(self, path: Path, library: tvm_ffi.Module) -> None:
        self.path = path
        self._library = library
        self.names = tuple(type(self).__annotations__)  # what a subclass declares is what its libraries export
        missing = [name for name in self.names if not library.implements_function(name)]
        if missing:
            raise KvgenError(f"{path} is no kvgen module: it lacks {', '.join(missing)}")
        for name in self.names:
            setattr(self, name, library.get_function(name))
        for name in Functions.__annotations__:
            setattr(self, name, library.get_function(name) if library.implements_function(name) else None)

    def __reduce__(self: F) -> tuple[Callable[[Path, type[F]], F], tuple[Path, type[F]]]:
        return load_as, (self.path, type(self))  # a copy of a cache calls the same library


class Module(Functions):
    """A module of attention."""

    advance: Callable[..., Any]
    attend: Callable[..., Any]
    crop: Callable[..., Any]
    decode: Callable[..., Any]
    pack: Callable[..., Any]
    plan: Callable[..., Any]
    plan_size: Callable[[int, int, int], int]
    split_tokens: Callable[[int, int, int], int]
    unpack: Callable[..., Any]
    workspace_bytes: Callable[..., Any]


class MatrixModule(Functions):
    """A module of operations on a matrix."""

    dequantize: Callable[..., Any]
    quantize: Callable[..., Any]
    scales: Callable[..., Any]


class LinearModule(Functions):
    """A module of a linear layer."""

    linear: Callable[..., Any]


def load_library(path: Path) -> tvm_ffi.Module:
    """Load any TVM-FFI shared library. Raises KvgenError if it cannot be loaded."""
    try:
        return tvm_ffi.load_module(os.fsencode(path).decode())  # TVM-FFI encodes as UTF-8, whatever the locale
    except Exception as error:
        raise KvgenError(f"cannot load {path}: {error}") from error


def load(path: Path) -> Module:
    """Load a compiled module of attention. Raises KvgenError if it cannot be loaded or lacks a function."""
    return load_as(path, Module)


def load_as(path: Path, kind: type[F]) -> F:
    """Load a compiled module of any operation. Raises as `load` does."""
    return kind(Path(path), load_library(path))


def set_threads(target: Target, modules: Iterable[Functions], count: int) -> None:
    """Threads of the following calls of CPU modules: at most one for each processor of the machine.

    Raises ValueError out of range and for other targets, TypeError if it is not an integer.
    """
    if target != "cpu":
        raise ValueError(f"set_threads({count}): threads belong to CPU kernels, and this one is for {target}")
    count = checks.whole("threads", count, 1, os.cpu_count() or 1)
    for module in modules:
        if module.set_threads is not None:
            module.set_threads(count)


def _end_threads() -> None:
    """End OpenMP's threads before a fork, which they do not survive: parent and child start new ones at their next parallel loop."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY).omp_pause_resource_all(1)


os.register_at_fork(before=_end_threads)
