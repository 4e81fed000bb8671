"""Which machine a spec is built for."""

from __future__ import annotations

import os
from functools import cache
from typing import Any, Literal, get_args

from kvgen.errors import ToolchainMissing
from kvgen.spec.model import Arch

Target = Literal["cpu", "sm80", "sm89", "sm90"]


def resolve(arch: Arch) -> Target:
    """The target that `arch` means here; `native` is the first visible GPU, or the CPU where there is none.

    Raises ToolchainMissing where the GPU is one that kvgen has no target for.
    """
    if arch != "native":
        return arch
    capability = gpu_capability()
    return "cpu" if capability is None else target_of(capability)


def target_of(capability: tuple[int, int]) -> Target:
    """The target whose code runs on a GPU of this compute capability. Raises ToolchainMissing where there is none."""
    major, minor = capability
    name = f"compute capability {major}.{minor}"
    if major < 8:
        raise ToolchainMissing(f"the GPU has {name}, but kvgen needs 8.0 or newer: write arch: cpu to use the processor")
    if major == 8:
        return "sm89" if minor >= 9 else "sm80"
    if major == 9:
        return "sm90"
    known = ", ".join(get_args(Target))
    raise ToolchainMissing(f"the GPU has {name}, which kvgen has no target for yet (it knows {known}): name one as arch")


RUNS_FROM: dict[Target, tuple[int, int]] = {"sm80": (8, 0), "sm89": (8, 9), "sm90": (9, 0)}
"""Least compute capability of a GPU target."""


def cannot_run(target: Target, capability: tuple[int, int] | None) -> str | None:
    """Why code for a target does not run here, in one clause; None if it runs. `capability` is the GPU's, None without a GPU.

    Modules for sm80 and sm89 hold machine code and PTX, which the driver compiles for any later GPU. Code for sm90 is sm_90a,
    or PTX for compute_90a: both run on capability 9 alone.
    """
    if target == "cpu":
        return None
    if capability is None:
        return "no NVIDIA GPU is visible"
    if capability < RUNS_FROM[target] or (target == "sm90" and capability[0] != 9):
        return f"{target} code does not run on this machine's GPU, which has compute capability {capability[0]}.{capability[1]}"
    return None


@cache
def gpu_capability() -> tuple[int, int] | None:
    """Compute capability of the first GPU that CUDA_VISIBLE_DEVICES leaves visible; None without GPU, driver or NVML."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if first in ("", "-1", "NoDevFiles"):
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(_handle(pynvml, first))
        return int(major), int(minor)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _handle(pynvml: Any, device: str) -> Any:
    """NVML's handle of a device named by index or by UUID."""
    if device.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(device))
    return pynvml.nvmlDeviceGetHandleByUUID(device)
