"""Targets, and what GPUs of each architecture have: the one table that compilers, search spaces and checks of the device read.

Sizes of shared memory are those of the CUDA C++ Programming Guide ("Technical Specifications per Compute Capability").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from kvgen.errors import ToolchainMissing

Target = Literal["cpu", "sm80", "sm89", "sm90"]
"""What code is generated for."""
Arch = Literal["native", Target]
"""What a spec may ask for: a target, or that of the machine."""

KB = 1024
CTA_RESERVED = KB
"""Bytes of shared memory that the system takes for every resident CTA."""


@dataclass(frozen=True)
class GpuArch:
    """One GPU architecture; sizes in bytes. Counts and speeds of whole GPUs are for the search only: a launch asks its own device."""

    capability: tuple[int, int]
    """Least compute capability that runs its code."""
    shared_per_sm: int
    """Shared memory of a multiprocessor."""
    bytes_in_flight: int
    """What the copies of a multiprocessor must keep in flight to cover the latency of memory: its bandwidth times 0.7 us."""
    sms: int
    """Multiprocessors of the usual GPU: A100, RTX 4090, H100 and H200."""
    specific: bool = False
    """Compiled for architecture-specific instructions (sm_90a): neither machine code nor PTX runs on a later architecture."""
    bulk_copies: bool = False
    """1-D bulk copies (cp.async.bulk)."""
    clusters: bool = False
    """Thread-block clusters and distributed shared memory."""
    clusters_at_once: Mapping[int, int] = field(default_factory=dict, hash=False)
    """Clusters that the usual GPU holds with one CTA per multiprocessor, by their CTAs. They may be fewer than multiprocessors over CTAs,
    since the CTAs of a cluster share a graphics processing cluster (GPC), and GPCs have unlike numbers of multiprocessors.
    """
    dependent_launch: bool = False
    """Programmatic dependent launch."""

    @property
    def shared_per_cta(self) -> int:
        """Most shared memory of one CTA."""
        return self.shared_per_sm - CTA_RESERVED

    def resident(self, cluster: int) -> int:
        """Clusters of so many CTAs that the usual GPU holds with one CTA per multiprocessor; CTAs, if `cluster` is 1."""
        return self.clusters_at_once.get(cluster, self.sms // cluster)

    @property
    def number(self) -> str:
        """`80`, `89`, `90a`: the architecture as compilers name it."""
        major, minor = self.capability
        return f"{major}{minor}{'a' if self.specific else ''}"


GPUS: dict[Target, GpuArch] = {
    "sm80": GpuArch((8, 0), 164 * KB, 12 * KB, 108),
    "sm89": GpuArch((8, 9), 100 * KB, 6 * KB, 128),
    "sm90": GpuArch(
        (9, 0),
        228 * KB,
        24 * KB,
        132,
        specific=True,
        bulk_copies=True,
        clusters=True,
        clusters_at_once={2: 66, 4: 30, 8: 15},
        dependent_launch=True,
    ),
}
"""The GPU targets, oldest first."""


def device_type(target: Target) -> Literal["cpu", "cuda"]:
    """What torch calls the kind of device that a target's code runs on."""
    return "cpu" if target == "cpu" else "cuda"


def target_of(capability: tuple[int, int]) -> Target:
    """The target to build for a GPU of this compute capability: the newest of its generation that it runs.

    Raises ToolchainMissing where there is none.
    """
    fitting: list[Target] = [name for name, gpu in GPUS.items() if gpu.capability[0] == capability[0] and gpu.capability <= capability]
    if fitting:
        return fitting[-1]
    has, least = f"the GPU has compute capability {_dotted(capability)}", min(gpu.capability for gpu in GPUS.values())
    if capability < least:
        raise ToolchainMissing(f"{has}, but kvgen needs {_dotted(least)} or newer: write arch: cpu to use the processor")
    raise ToolchainMissing(f"{has}, which kvgen has no target for yet (it knows {', '.join(get_args(Target))}): name one as arch")


def cannot_run(target: Target, capability: tuple[int, int] | None) -> str | None:
    """Why code for a target does not run here, in one clause; None if it runs. `capability` is the GPU's, None without a GPU.

    Modules hold machine code and PTX, which the driver compiles for any later GPU. Those of a specific architecture run on its own
    generation only.
    """
    if target == "cpu":
        return None
    if capability is None:
        return "no NVIDIA GPU is visible"
    gpu = GPUS[target]
    if capability < gpu.capability or (gpu.specific and capability[0] != gpu.capability[0]):
        return f"{target} code does not run on this machine's GPU, which has compute capability {_dotted(capability)}"
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
