"""A spec, its layout and compiled modules for it (a good one, and one per fault), small enough for unit tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from kvgen.format.layout import PackedLayout, packed_layout
from kvgen.lower.backend import FUNCTIONS, Source
from kvgen.lower.schedule import Params, Schedule
from kvgen.runtime.calls import Variant
from kvgen.runtime.module import load
from kvgen.spec import KernelSpec, load_spec
from kvgen.toolchain import Artifact, ArtifactCache, build

BLOCK = 32


def naive_spec(paged: bool = False, q_len: int = 2) -> KernelSpec:
    """Unquantized float32, 4 query heads on 2 KV heads of 32 channels."""
    return load_spec(
        {
            "name": "naive",
            "arch": "cpu",
            "attention": {"q_heads": 4, "kv_heads": 2, "head_dim": 32, "dtype": "float32", "q_len": q_len},
            "key": {"bits": 16},
            "value": {"bits": 16},
            "cache": {"layout": "paged", "page": 64} if paged else {},
            "workloads": [{"batch": 2, "kv_len": 96}],
        }
    )


def naive_layout(spec: KernelSpec) -> PackedLayout:
    return packed_layout(spec, BLOCK, "simd")


def naive_schedule() -> Schedule:
    return Schedule("cpu", Params(block=BLOCK, order="simd"), Params(splits=1))


def naive_source(fault: str | None = None) -> Source:
    """`fault`: crash, hang, wrong; eat: without end in one call; leak: 8 MiB a call, for good; greed: a workspace of 1 TiB a sequence."""
    text = (Path(__file__).parent / "naive.cpp").read_text()
    return Source(f"#define FAULT_{fault.upper()}\n{text}" if fault else text, "c++", "cpu", functions=FUNCTIONS)


def naive_artifact(fault: str | None = None, cache: ArtifactCache | None = None) -> Artifact:
    """Compiled once for all test runs that share a cache."""
    return build(naive_source(fault), cache)


def naive_variant(paged: bool = False, **wrappers: Callable[..., object]) -> Variant:
    """The naive module on torch tensors, with some of its functions wrapped: wrapper(function, *args)."""
    module = load(naive_artifact().path)
    functions = {name: getattr(module, name) for name in FUNCTIONS}
    for name, wrapper in wrappers.items():
        functions[name] = partial(wrapper, functions[name])
    spec = naive_spec(paged)
    return Variant(spec, naive_layout(spec), SimpleNamespace(**functions, set_threads=None) if wrappers else module)  # type: ignore[arg-type]
