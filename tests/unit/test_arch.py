"""The table of architectures: what runs where."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from kvgen.arch import GPUS, KB, Target, cannot_run, target_of


def test_every_target_but_the_cpu_has_its_facts() -> None:
    assert ("cpu", *GPUS) == get_args(Target)
    assert {target: gpu.shared_per_cta for target, gpu in GPUS.items()} == {"sm80": 163 * KB, "sm89": 99 * KB, "sm90": 227 * KB}
    assert [target for target, gpu in GPUS.items() if gpu.clusters] == ["sm90"]
    assert [target_of(gpu.capability) for gpu in GPUS.values()] == list(GPUS)


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
