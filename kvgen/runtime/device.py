"""Whether this machine runs a target's code, and numbers for its devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvgen._machine import gpu_capability
from kvgen.arch import Target, cannot_run
from kvgen.errors import ToolchainMissing


def cannot_run_here(target: Target) -> str | None:
    """Why code for a target does not run on this machine, in one clause; None if it runs. Does not start CUDA up.

    Where NVML is missing, torch is asked for the GPU.
    """
    if target == "cpu":
        return None
    capability = gpu_capability() or (torch.cuda.get_device_capability() if torch.cuda.is_available() else None)
    reason = cannot_run(target, capability)
    if reason is None and torch.version.cuda is None:
        reason = f"torch {torch.__version__} is built without CUDA"
    return reason


def require_device(target: Target) -> None:
    """Raises ToolchainMissing if code for the target cannot run on this machine. Does not start CUDA up."""
    if (reason := cannot_run_here(target)) is not None:
        raise ToolchainMissing(f"no kernel for {target} runs here: {reason}")


def copied(numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers on a device, for which the host does not wait. Raises ValueError while a CUDA graph is captured, which would copy them from
    memory that is others' when it is replayed.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError("rows of these numbers of tokens were not called before the CUDA graph is captured: call them once")
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
