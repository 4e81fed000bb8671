"""The table of architectures: what a spec is built for here, and what runs where."""

from __future__ import annotations

from typing import Any

import pytest

from kvgen.arch import cannot_run
from kvgen.errors import ToolchainMissing
from kvgen.spec import target


@pytest.mark.parametrize(
    ("capability", "expected"), [(None, "cpu"), ((8, 0), "sm80"), ((8, 7), "sm80"), ((8, 9), "sm89"), ((9, 0), "sm90")]
)
def test_native_is_the_gpu_or_the_cpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, expected: str) -> None:
    monkeypatch.setattr(target, "gpu_capability", lambda: capability)
    assert target.resolve("native") == expected
    assert target.resolve("sm89") == "sm89"


@pytest.mark.parametrize(("capability", "reason"), [((7, 5), "7.5, but kvgen needs 8.0"), ((10, 0), "10.0, which kvgen has no target")])
def test_other_gpus_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], reason: str) -> None:
    monkeypatch.setattr(target, "gpu_capability", lambda: capability)
    with pytest.raises(ToolchainMissing, match=reason):
        target.resolve("native")


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("cpu", None, True),
        ("sm80", None, False),
        ("sm80", (7, 5), False),
        ("sm80", (8, 0), True),
        ("sm80", (12, 0), True),  # through its PTX
        ("sm89", (8, 6), False),
        ("sm89", (10, 0), True),
        ("sm90", (8, 9), False),
        ("sm90", (9, 0), True),
        ("sm90", (10, 0), False),  # sm_90a is for capability 9 alone
    ],
)
def test_code_runs_where_its_cubin_or_ptx_does(arch: Any, capability: tuple[int, int] | None, runs: bool) -> None:
    assert (cannot_run(arch, capability) is None) == runs
