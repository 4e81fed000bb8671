"""What runs here: one answer for `get_kernel`, `kvgen build` and `kvgen check`."""

from __future__ import annotations

import pytest
import torch

from kvgen.arch import Target
from kvgen.errors import ToolchainMissing
from kvgen.runtime import device


@pytest.mark.parametrize(
    ("target", "capability", "runs"),
    [
        ("sm80", (8, 6), True),
        ("sm89", (8, 0), False),
        ("sm90", (9, 0), True),
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
