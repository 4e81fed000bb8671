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
MODELS = {
    "llama31_8b_kv4": (32, 8, 128, {}),
    "qwen3_8b_bf16_kv4": (32, 8, 128, {}),
    "mistral_7b_kv4": (32, 8, 128, {"window": 4096}),
    "gemma2_9b_kv8": (16, 8, 256, {"window": 4096, "softcap": 50.0}),
    "gemma2_9b_global_kv8": (16, 8, 256, {"softcap": 50.0}),
    "gpt_oss_kv8": (64, 8, 64, {"sinks": True}),
    "gpt_oss_local_kv8": (64, 8, 64, {"sinks": True, "window": 128}),
}
"""Query heads, KV heads, head_dim, and what else attention has; from the models' configurations."""


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


def test_models_have_their_shapes() -> None:
    for name, (q_heads, kv_heads, head_dim, more) in MODELS.items():
        attention = load_spec(ROOT / "examples" / f"{name}.yaml").attention
        assert (attention.q_heads, attention.kv_heads, attention.head_dim) == (q_heads, kv_heads, head_dim)
        assert {"window": attention.window, "softcap": attention.softcap, "sinks": attention.sinks} == {
            "window": None, "softcap": 0.0, "sinks": False, **more,
        }  # fmt: skip


def test_every_preset_has_an_example() -> None:
    def stored(spec: KernelSpec) -> object:
        return spec.key, spec.value, spec.cache

    shown = [stored(load_spec(file)) for file in EXAMPLES]
    assert [name for name, spec in presets().items() if stored(spec) not in shown] == []
