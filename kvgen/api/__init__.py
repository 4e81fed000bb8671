"""The API of a program: `get_kernel`, `build`, `Kernel`, the table of supported features. Names are loaded on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvgen.api.fetch import FallbackWarning, forget, get_kernel, get_matrix_kernel
    from kvgen.api.kernel import Kernel, MatrixKernel
    from kvgen.api.support import support_table
    from kvgen.api.tuning import build

__all__ = ["FallbackWarning", "Kernel", "MatrixKernel", "build", "forget", "get_kernel", "get_matrix_kernel", "support_table"]

_HOMES = {"Kernel": "kernel", "MatrixKernel": "kernel", "build": "tuning", "support_table": "support"}


def __getattr__(name: str) -> Any:
    """Fetching needs no tuner, and the table of support no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"kvgen.api.{_HOMES.get(name, 'fetch')}"), name)
    return value
