"""Which machine a spec is built for."""

from __future__ import annotations

from kvgen._machine import gpu_capability
from kvgen.arch import Arch, Target, target_of


def resolve(arch: Arch) -> Target:
    """The target that `arch` means here; `native` is the first visible GPU, or the CPU if there is none.

    Raises ToolchainMissing for a GPU for which kvgen has no target.
    """
    if arch != "native":
        return arch
    capability = gpu_capability()
    return "cpu" if capability is None else target_of(capability)
