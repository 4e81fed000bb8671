"""The table of back ends, how their launches divide calls, and what both of those for GPUs refuse."""

from __future__ import annotations

import pytest

from benchmarks.gpu_words import schedules_of, spec_of
from kvgen.errors import KvgenError, UnsupportedError
from kvgen.lower.backend import backends_for, get_backend
from kvgen.spec import KernelSpec, Workload, presets
from kvgen.spec.dispatch import MOST_WAVES, Tiling
from tests.support.specs import kv4_spec


def test_each_target_has_its_back_ends_and_other_names_are_refused() -> None:
    assert [b.name for b in backends_for("cpu")] == ["cpu"]
    assert [b.name for b in backends_for("sm90")] == ["cuda", "tilelang"]
    with pytest.raises(KvgenError, match="there is no back end 'metal': choose from cuda, tilelang, cpu"):
        get_backend("metal")


@pytest.mark.parametrize("name", ["bitdecoding-int4", "bitdecoding-int2", "turbomind-int8"])
def test_gpu_back_ends_share_layout_parts(name: str) -> None:
    """What entries with launches of both rest on."""
    cuda, tilelang = (get_backend(one) for one in ("cuda", "tilelang"))
    shared = set(cuda.space(presets()[name], "sm90").layouts()) & set(tilelang.space(presets()[name], "sm90").layouts())
    assert tilelang.default(presets()[name], "sm90").layout in shared


def tiling_of(words: str, schedule: str = "w8u4d1", backend: str = "cuda") -> Tiling:
    lowering, spec = get_backend(backend), spec_of(words, "sm90", [Workload(batch=1, kv_len=4096)])
    found = lowering.tiling(spec, schedules_of(schedule, lowering, spec, "sm90")[0], "sm90")
    assert found is not None
    return found


def test_a_cuda_launch_tells_how_its_ctas_run_on_a_gpu() -> None:
    one, four, clusters = (tiling_of("k4v4", schedule) for schedule in ("w8u4d1", "w2u2d1c4", "w8u4d1.cl2"))
    assert (one.heads, one.resident, one.step_tokens, one.most_waves, one.visible) == (8, 132, 128, MOST_WAVES, None)
    assert 128 * 128 < one.tile_bytes < 1.1 * 128 * 128, "K and V of 128 channels in 4 bits, with their scales"
    assert (four.resident, four.ctas_per_sm, four.step_tokens) == (528, 4, 64)
    assert (clusters.resident, clusters.step_tokens, clusters.most_waves) == (66, 256, 1)
    assert tiling_of("k4v4:window1024").visible == 1024 + 128


def test_more_query_rows_than_a_cta_holds_are_more_heads() -> None:
    """32 query heads over each of two KV heads."""
    assert tiling_of("k4v4:h64/2").heads == 4
    assert tiling_of("k4v4:h64/2", "default", "tilelang").heads == 8


REFUSED: dict[str, KernelSpec] = {
    "attention.dtype is float32": kv4_spec(attention={"dtype": "float32"}),
    r"attention.head_dim \(528\) is more than 512": kv4_spec(attention={"head_dim": 528}, value={"group": 528}),
    r"attention.q_len \(64\) is more than 8": kv4_spec(attention={"q_len": 64}),
    r"key.group \(8 channels\)": kv4_spec(key={"axis": "token", "group": 8}),
    r"value.group \(8 channels\)": kv4_spec(value={"group": 8}),
    "32 query heads times 5 query tokens": kv4_spec(attention={"q_heads": 64, "kv_heads": 2, "q_len": 5}),
}


@pytest.mark.parametrize("name", ["cuda", "tilelang"])
def test_what_gpus_cannot_do_is_named_and_nothing_else_is_built(name: str) -> None:
    backend = get_backend(name)
    for words, example in REFUSED.items():
        for target in backend.targets:
            with pytest.raises(UnsupportedError, match=words):
                backend.default(example, target)
    assert backend.unsupported(kv4_spec(), "cpu") == "it lowers for sm80, sm89, sm90, not for cpu"
