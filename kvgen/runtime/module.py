"""A compiled variant as Python functions; `docs/abi.md` lists their arguments."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import tvm_ffi

from kvgen.errors import KvgenError
from kvgen.lower.functions import FUNCTIONS, MATRIX_FUNCTIONS
from kvgen.runtime import forks

F = TypeVar("F", bound="Functions")

OPTIONAL = ("set_threads",)
"""None if the module has no such function: only CPU modules have threads."""


class Functions:
    """The functions of a loaded shared library, bound once; the library stays loaded as long as this object lives."""

    __slots__ = ("__weakref__", "_library", "path", *OPTIONAL)
    names: ClassVar[tuple[str, ...]]
    """Functions that the library must export."""

    set_threads: Callable[[int], Any] | None

    def __init__(self, path: Path, library: tvm_ffi.Module) -> None:
        self.path = path
        self._library = library
        missing = [name for name in self.names if not library.implements_function(name)]
        if missing:
            raise KvgenError(f"{path} is no kvgen module: it lacks {', '.join(missing)}")
        for name in self.names:
            setattr(self, name, library.get_function(name))
        for name in OPTIONAL:
            setattr(self, name, library.get_function(name) if library.implements_function(name) else None)
        forks.watch(self)

    def __copy__(self: F) -> F:
        other = type(self).__new__(type(self))
        for name in ("path", "_library", *self.names, *OPTIONAL):
            if hasattr(self, name):
                setattr(other, name, getattr(self, name))
        return other

    def __reduce__(self: F) -> tuple[Callable[[Path, type[F]], F], tuple[Path, type[F]]]:
        return load_as, (self.path, type(self))  # a copy of a cache calls the same library

    def after_fork(self) -> None:
        """In a forked child: replace functions that cannot run by ones that raise."""
        reason = forks.broken(gpu=self.set_threads is None)
        if reason is None:
            return

        def refuse(*_: object) -> NoReturn:
            raise KvgenError(reason)

        for name in self.names:
            setattr(self, name, refuse)


class Module(Functions):
    """A module of attention."""

    __slots__ = FUNCTIONS
    names = FUNCTIONS

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

    __slots__ = MATRIX_FUNCTIONS
    names = MATRIX_FUNCTIONS

    dequantize: Callable[..., Any]
    quantize: Callable[..., Any]
    scales: Callable[..., Any]


def load_library(path: Path) -> tvm_ffi.Module:
    """Load any TVM-FFI shared library. Raises KvgenError if it cannot be loaded."""
    try:
        return tvm_ffi.load_module(os.fsencode(path).decode())  # TVM-FFI encodes as UTF-8, whatever the locale
    except Exception as error:
        raise KvgenError(f"cannot load {path}: {error}") from error


def load(path: Path) -> Module:
    """Load a compiled variant of attention. Raises KvgenError if it cannot be loaded or lacks a function."""
    return load_as(path, Module)


def load_as(path: Path, kind: type[F]) -> F:
    """Load a compiled variant of any operation. Raises as `load` does."""
    return kind(Path(path), load_library(path))
