"""The result of a compilation: a shared library, and the resources of each kernel in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from kvgen.plaindata import Json, rounded


@dataclass(frozen=True, slots=True)
class KernelResources:
    """Resources of one device kernel; bytes are per thread, `shared_bytes` is static shared memory per block."""

    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    stack_bytes: int = 0


@dataclass(frozen=True)
class Resources(Json):
    """Compile time and resources of the kernels; `kernels` is empty for the CPU."""

    compiler: str
    seconds: Annotated[float, rounded(3)]
    kernels: Mapping[str, KernelResources] = field(default_factory=dict)

    @property
    def spill_bytes(self) -> int:
        """Largest number of bytes of register spills of a kernel."""
        return max((kernel.spill_bytes for kernel in self.kernels.values()), default=0)


@dataclass(frozen=True, slots=True)
class Artifact:
    """A compiled variant: the shared library at `path`; `id` names source, compiler, flags and machine features."""

    id: str
    path: Path
    resources: Resources
    sha256: str = field(default="", compare=False)
    """Digest of the library's bytes, as the cache keeps it."""
    origin: str = field(default="", compare=False)
    """The machine that compiled it, if it was another one."""
