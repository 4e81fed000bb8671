"""The table of architectures: what runs where."""

from __future__ import annotations

from typing import Any

import pytest

from kvgen.arch import cannot_run


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
