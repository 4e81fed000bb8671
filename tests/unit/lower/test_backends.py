"""The table of back ends."""

from __future__ import annotations

import pytest

from benchmarks.gpu_words import schedules_of, spec_of
from kvgen.errors import KvgenError, ToolchainMissing
from kvgen.lower import backend as backends
from kvgen.lower.backend import get_backend
from kvgen.lower.schedule import Params, Schedule
from kvgen.spec import Workload, presets
from kvgen.spec.dispatch import MOST_WAVES, Tiling


def test_the_cpu_back_end_is_always_there_and_serves_the_cpu() -> None:
    assert backends.get_backend("cpu").name == "cpu"
    assert [b.name for b in backends.backends_for("cpu")] == ["cpu"]
    assert "cpu" not in {b.name for b in backends.backends_for("sm90")}
    assert "cpu" not in backends.missing_backends()


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(KvgenError, match="there is no back end 'metal': choose from cuda, tilelang, cpu"):
        backends.get_backend("metal")


def test_a_missing_library_is_reported_and_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def importer(name: str) -> object:
        if name.endswith("tilelang"):
            raise ImportError("No module named 'tilelang'")
        return imported(name)

    imported = backends.importlib.import_module
    monkeypatch.setattr(backends.importlib, "import_module", importer)
    with pytest.raises(ToolchainMissing, match="the tilelang back end cannot be loaded: No module named 'tilelang'"):
        backends.get_backend("tilelang")
    assert backends.missing_backends()["tilelang"].endswith("No module named 'tilelang'")
    assert [b.name for b in backends.backends_for("cpu")] == ["cpu"]


@pytest.mark.parametrize("name", ["bitdecoding-int4", "bitdecoding-int2", "turbomind-int8"])
def test_gpu_back_ends_share_layout_parts(name: str) -> None:
    """What entries with launches of both rest on."""
    spec = presets()[name]
    cuda, tilelang = backends.get_backend("cuda"), backends.get_backend("tilelang")
    shared = set(cuda.space(spec, "sm90").layouts()) & set(tilelang.space(spec, "sm90").layouts())
    assert tilelang.default(spec, "sm90").layout in shared


def tiling_of(words: str, schedule: str, backend: str = "cuda") -> Tiling | None:
    lowering, spec = get_backend(backend), spec_of(words, "sm90", [Workload(batch=1, kv_len=4096)])
    return lowering.tiling(spec, schedules_of(schedule, lowering, spec, "sm90")[0], "sm90")


def test_a_cuda_launch_tells_how_its_ctas_run_on_a_gpu() -> None:
    one, four = tiling_of("k4v4", "w8u4d1"), tiling_of("k4v4", "w2u2d1c4")
    assert one is not None
    assert four is not None
    assert (one.heads, one.resident, one.step_tokens, one.most_waves, one.visible) == (8, 132, 128, MOST_WAVES, None)
    assert 128 * 128 < one.tile_bytes < 1.1 * 128 * 128, "K and V of 128 channels in 4 bits, with their scales"
    assert (four.resident, four.ctas_per_sm, four.step_tokens) == (528, 4, 64)


def test_the_splits_of_a_launch_with_clusters_run_at_once() -> None:
    clusters = tiling_of("k4v4", "w8u4d1.cl2")
    assert clusters is not None
    assert (clusters.resident, clusters.step_tokens, clusters.most_waves) == (66, 256, 1)


@pytest.mark.parametrize("backend", ["cuda", "tilelang"])
def test_more_query_rows_than_a_cta_holds_are_more_heads(backend: str) -> None:
    """32 query heads over each of two KV heads."""
    found = tiling_of("k4v4:h64/2", "default" if backend == "tilelang" else "w8u4d1", backend)
    assert found is not None
    assert found.heads == (8 if backend == "tilelang" else 4)


def test_with_a_window_a_sequence_has_no_more_tokens_than_it() -> None:
    found = tiling_of("k4v4:window1024", "w8u4d1")
    assert found is not None
    assert found.visible == 1024 + 128


def test_the_launches_of_a_cpu_are_alike() -> None:
    cpu, spec = get_backend("cpu"), spec_of("k4v4", "cpu", [Workload(batch=1, kv_len=4096)])
    default = cpu.default(spec, "cpu")
    other = Schedule("cpu", default.layout, Params(default.launch, split_tokens=1024))
    assert cpu.tiling(spec, default, "cpu") == cpu.tiling(spec, other, "cpu")
