"""The API of a program: `get_kernel`, `build`, `Kernel`, the table of supported features."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvgen.api.fetch import FallbackWarning, forget, get_kernel, get_matrix_kernel
    from kvgen.api.kernel import Kernel
    from kvgen.api.matrix import MatrixKernel
    from kvgen.api.support import support_table
    from kvgen.api.tuning import build

__all__ = ["FallbackWarning", "Kernel", "MatrixKernel", "build", "forget", "get_kernel", "get_matrix_kernel", "support_table"]

_HOMES = {
    "FallbackWarning": "fetch",
    "Kernel": "kernel",
    "MatrixKernel": "matrix",
    "build": "tuning",
    "forget": "fetch",
    "get_kernel": "fetch",
    "get_matrix_kernel": "fetch",
    "support_table": "support",
}


def __getattr__(name: str) -> Any:
    """Load on first use: fetching needs no tuner, and the table of support no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"kvgen.api.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
