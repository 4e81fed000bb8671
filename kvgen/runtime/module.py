"""A compiled variant as Python functions; `docs/abi.md` lists their arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import tvm_ffi

from kvgen.errors import KvgenError
from kvgen.lower.functions import FUNCTIONS
from kvgen.runtime import forks

OPTIONAL = ("set_threads",)
"""None if the module has no such function: only CPU modules have threads."""


class Module:
    """The functions of a loaded shared library, bound once; the library stays loaded as long as this object lives."""

    __slots__ = ("__weakref__", "_library", "path", *FUNCTIONS, *OPTIONAL)

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
    set_threads: Callable[[int], Any] | None

    def __init__(self, path: Path, library: tvm_ffi.Module) -> None:
        self.path = path
        self._library = library
        missing = [name for name in FUNCTIONS if not library.implements_function(name)]
        if missing:
            raise KvgenError(f"{path} is no kvgen module: it lacks {', '.join(missing)}")
        for name in FUNCTIONS:
            setattr(self, name, library.get_function(name))
        for name in OPTIONAL:
            setattr(self, name, library.get_function(name) if library.implements_function(name) else None)
        forks.watch(self)

    def __copy__(self) -> Module:
        other = Module.__new__(Module)
        for name in ("path", "_library", *FUNCTIONS, *OPTIONAL):
            if hasattr(self, name):
                setattr(other, name, getattr(self, name))
        return other

    def __reduce__(self) -> tuple[Callable[[Path], Module], tuple[Path]]:
        return load, (self.path,)  # a copy of a cache calls the same library

    def after_fork(self) -> None:
        """In a forked child: replace functions that cannot run by ones that raise."""
        reason = forks.broken(gpu=self.set_threads is None)
        if reason is None:
            return

        def refuse(*_: object) -> NoReturn:
            raise KvgenError(reason)

        for name in FUNCTIONS:
            setattr(self, name, refuse)


def load_library(path: Path) -> tvm_ffi.Module:
    """Load any TVM-FFI shared library. Raises KvgenError if it cannot be loaded."""
    try:
        return tvm_ffi.load_module(str(path))
    except Exception as error:
        raise KvgenError(f"cannot load {path}: {error}") from error


def load(path: Path) -> Module:
    """Load a compiled variant. Raises KvgenError if it cannot be loaded or lacks a function."""
    return Module(Path(path), load_library(path))
