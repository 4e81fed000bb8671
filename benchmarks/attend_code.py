"""What the `attend` kernels of a compiled module use: registers, spills, and the instructions of their loop over packed KV tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.sass import count, disassemble, hot_loop
from kvgen.toolchain import Artifact
from kvgen.toolchain.ptxas import short_names

SUBTILE = 32
"""Tokens of a sub-tile, which the counts are of."""


@dataclass(frozen=True)
class AttendKernel:
    """One kernel. `loop`: instructions per sub-tile by kind; what an iteration of the loop runs once is divided by its sub-tiles."""

    name: str
    """Without template arguments: `attend_static`."""
    append: bool
    """Whether it appends new tokens."""
    registers: int
    spill_bytes: int
    code: int
    """Instructions of the whole kernel."""
    loop: Mapping[str, float]


def attend_kernels(artifact: Artifact, kv_tile: int) -> list[AttendKernel]:
    """The `attend` kernels of a module, ordered by name. Raises ToolchainMissing without cuobjdump and nvdisasm."""
    functions = disassemble(artifact.path)
    named = dict(zip(short_names(list(functions)), functions.values(), strict=True))
    kernels = []
    for name in sorted(named):
        if name.startswith("attend"):
            used, code = artifact.resources.kernels[name], named[name]
            loop = {kind: number * SUBTILE / kv_tile for kind, number in count(hot_loop(code)).items()}
            append = name.endswith("true>")
            kernels.append(AttendKernel(name.partition("<")[0], append, used.registers, used.spill_bytes, len(code), loop))
    return kernels
