"""What runs here: one answer for `get_kernel`, `kvgen build` and `kvgen check`."""

from __future__ import annotations

import pytest
import torch

from kvgen.arch import Target
from kvgen.errors import ToolchainMissing
from kvgen.runtime import device
from kvgen.runtime.device import cannot_run_here
from kvgen.tune.regression import entry as entry_check


@pytest.mark.parametrize(
    ("target", "capability", "runs"),
    [
        ("sm80", (8, 6), True),
        ("sm80", (9, 0), True),
        ("sm89", (8, 0), False),
        ("sm89", (8, 9), True),
        ("sm90", (9, 0), True),
        ("sm90", (8, 9), False),
        ("sm90", (10, 0), False),
        ("cpu", (8, 0), True),
    ],
)
def test_which_gpu_runs_which_target(monkeypatch: pytest.MonkeyPatch, target: Target, capability: tuple[int, int], runs: bool) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device, "gpu_capability", lambda: capability)
    if runs:
        device.require_device(target)
    else:
        with pytest.raises(ToolchainMissing, match=f"which has compute capability {capability[0]}.{capability[1]}"):
            device.require_device(target)


def test_without_nvml_torch_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device, "gpu_capability", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert cannot_run_here("sm90") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cannot_run_here("sm90") == "no NVIDIA GPU is visible"
    monkeypatch.setattr(device, "gpu_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert cannot_run_here("sm90") == f"torch {torch.__version__} is built without CUDA"


def test_check_asks_what_get_kernel_asks() -> None:
    assert entry_check.cannot_run_here is cannot_run_here
