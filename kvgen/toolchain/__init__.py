"""Source to shared library: compilers, and a content-addressed cache of their results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvgen.toolchain.artifact import Artifact, KernelResources, Resources
    from kvgen.toolchain.cache import ArtifactCache
    from kvgen.toolchain.compile import build

_HOME = {"Artifact": "artifact", "KernelResources": "artifact", "Resources": "artifact", "ArtifactCache": "cache", "build": "compile"}

__all__ = ["Artifact", "ArtifactCache", "KernelResources", "Resources", "build"]


def __getattr__(name: str) -> Any:
    """Load on first use: finding a compiled module needs no compiler."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"kvgen.toolchain.{_HOME[name]}"), name)
