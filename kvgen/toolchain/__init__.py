"""Source to shared library: compilers, and a content-addressed cache of their results."""

from __future__ import annotations

from kvgen.toolchain.cache import Artifact, ArtifactCache, KernelResources, Resources
from kvgen.toolchain.compile import build

__all__ = ["Artifact", "ArtifactCache", "KernelResources", "Resources", "build"]
