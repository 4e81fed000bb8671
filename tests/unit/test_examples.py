"""Every example is a spec that each back end computes or refuses with a reason, and whose workloads fit on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from kvgen.arch import Target
from kvgen.errors import UnsupportedError
from kvgen.format.sizes import must_read
from kvgen.lower.backend import NAMES, get_backend
from kvgen.lower.schedule import layout_of
from kvgen.spec import KernelSpec, load_spec, presets

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
MEMORY = 140 << 30
"""Bytes of an H200."""


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_every_back_end_computes_an_example_or_says_why_not(file: Path) -> None:
    spec = load_spec(file)
    assert spec.arch == "native"
    for backend in map(get_backend, NAMES):
        for target in [target for target in get_args(Target) if target in backend.targets]:
            reason = backend.unsupported(spec, target)
            if reason is None:
                schedule = backend.default(spec, target)
                space = backend.space(spec, target)
                assert [problem for work in spec.workloads for problem in space.check(schedule, work)] == []
                layout = layout_of(spec, schedule.layout)
                assert all(0 < must_read(spec, layout, [work.kv_len] * work.batch) < MEMORY for work in spec.workloads)
            else:
                assert len(reason.split()) > 2
                with pytest.raises(UnsupportedError, match=r"\w"):
                    backend.default(spec, target)


def test_every_preset_has_an_example() -> None:
    def stored(spec: KernelSpec) -> object:
        return spec.key, spec.value, spec.cache

    shown = [stored(load_spec(file)) for file in EXAMPLES]
    assert [name for name, spec in presets().items() if stored(spec) not in shown] == []
