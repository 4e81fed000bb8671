"""The back end's answers, with and without TileLang."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from benchmarks.gpu_words import schedule_word, schedules_of, spec_of, workload_of
from kvgen.arch import GPUS, Target
from kvgen.errors import CompileError, ToolchainMissing, UnsupportedError
from kvgen.lower.backend import get_backend, refusal
from kvgen.lower.gpu import first_refusal
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.tilelang import isolate, support
from kvgen.spec import KernelSpec, Workload

WORDS = (
    "k4v4", "k8v8", "k2v2", "k8v8:d256", "k4v4:h16/1", "k4v4:bf16:q4:page128", "k2v2:token:kg32:vg32", "k8v8:d256:h16/1:q2",
    "k16v16:bf16",
)  # fmt: skip
KERNELS = {
    which: {"name": f"attend_{which}_kernel", "text": f"// {which}\n", "parameters": ["q", "splits"], "shared_bytes": 1024}
    for which in ("static", "planned")
}


def spec(words: str, *workloads: str) -> KernelSpec:
    return spec_of(words, "sm90", [workload_of(word) for word in workloads or ("1x4096", "8x32768")])


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path))
    return tmp_path


def answer(monkeypatch: pytest.MonkeyPatch, stdout: str = "", returncode: int = 0, error: Exception | None = None) -> list[str]:
    """Stand in for the other process; the requests that it gets."""
    requests: list[str] = []

    def run(command: list[str], timeout_s: float, text: str, **options: object) -> subprocess.CompletedProcess[str]:
        requests.append(text)
        if error is not None:
            raise error
        return subprocess.CompletedProcess(command, returncode, stdout, "it broke")

    monkeypatch.setattr(isolate, "run", run)
    monkeypatch.setattr(isolate, "missing", lambda: None)
    return requests


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("target", GPUS)
def test_the_default_is_in_the_space(words: str, target: Target) -> None:
    backend = get_backend("tilelang")
    wanted = spec(words)
    schedule = backend.default(wanted, target)
    for workload in wanted.workloads:
        assert backend.space(wanted, target).doubts(schedule, workload) == []


@pytest.mark.parametrize(
    ("words", "schedule"),
    [("k4v4", "n128.w8u2s2t1c1"), ("k8v8", "n128.w8u2s2t1c1"), ("k2v2", "n128.w12u4s4t1c1"), ("k4v2:page64:kg32", "n64.w8u1s4t1c1")],
)
def test_the_default_follows_the_bits(words: str, schedule: str) -> None:
    assert schedule_word(get_backend("tilelang").default(spec(words), "sm90")) == schedule


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("work", ["1x4096", "1x131072", "8x32768", "32x8192", "256x1024"])
def test_a_workload_has_few_points(words: str, work: str) -> None:
    space = get_backend("tilelang").space(spec(words, work), "sm90")
    points = [len(space.launches(layout, workload_of(work))) for layout in space.layouts()]
    assert all(points)
    assert sum(points) <= 48


def test_what_cannot_win_is_not_searched() -> None:
    """A tile-level form, or a cluster of eight, can be asked for by hand."""
    backend = get_backend("tilelang")
    wanted = spec("k4v4", "1x32768")
    space = backend.space(wanted, "sm90")
    for word in ("w4u2s2.gemm", "w8u2s2.cl", "w4u4s4c2"):
        (schedule,) = schedules_of(word, backend, wanted, "sm90")
        assert space.check(schedule, wanted.workloads[0]) == []
        assert space.doubts(schedule, wanted.workloads[0])


def test_layouts_are_those_of_the_cuda_back_end() -> None:
    wanted = spec("k4v4")
    mine, other = get_backend("tilelang"), get_backend("cuda")
    assert set(mine.space(wanted, "sm90").layouts()) == set(other.space(wanted, "sm90").layouts())


@pytest.mark.parametrize(
    ("section", "changes", "reason"),
    [
        ("attention", {"head_dim": 80}, "head_dim"),
        ("attention", {"kv_heads": 1, "q_heads": 256}, "256 query heads"),
        ("attention", {"kv_heads": 1, "q_len": 8}, "more than 128 rows"),
        ("value", {"group": 16}, "multiples of 32"),
        ("attention", {"dtype": "float32"}, "float32"),
        ("value", {"axis": "channel", "group": 16}, "value.group"),
        ("key", {"group": 48}, "key.group"),
        ("value", {"bits": 2, "group": 16}, "must be multiples of 32 channels"),
    ],
)
def test_what_is_not_built_is_refused_by_name(section: str, changes: dict[str, object], reason: str) -> None:
    data = spec("k4v4").to_json()
    data[section] |= changes
    if section == "attention" and "head_dim" in changes:
        data["value"]["group"] = changes["head_dim"]
    refused = KernelSpec(**data)
    assert reason in str(first_refusal(support.REFUSALS, refused))
    with pytest.raises(UnsupportedError, match=reason.split()[0]):
        get_backend("tilelang").space(refused, "sm90")


def test_what_no_packing_kernel_holds_is_refused_with_its_size() -> None:
    data = spec("k4v4").to_json()
    data["attention"]["head_dim"] = 256
    data["key"]["group"], data["value"] = 32, {"bits": 4, "axis": "channel", "group": 512}
    refused = get_backend("tilelang").unsupported(KernelSpec(**data), "sm90")
    assert "key.group 32 and value.group 512 needs blocks of 512 tokens" in str(refused)


def test_a_tilelang_that_is_too_old_is_named_and_newer_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Server packages pin 0.1.12. The back end answers for specs whatever is installed, and refuses to lower."""
    backend = get_backend("tilelang")
    old = "tilelang 0.1.12 is installed, and its programs need 0.1.15 or newer"
    for found, why in (("0.1.12", old), ("0.1.15", None), ("0.1.20", None)):
        monkeypatch.setattr(support, "version", lambda _, found=found: found)
        assert backend.missing() == why
        assert backend.unsupported(spec("k4v4"), "sm90") is None
        assert refusal(backend, spec("k4v4"), "sm90") == why
        assert support.tilelang_version() == (found if why is None else "0.1.15")


def test_without_tilelang_the_line_to_type_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(support, "version", absent)
    assert get_backend("tilelang").missing() == "tilelang is not installed: pip install 'kvgen[build]'"


def test_without_tilelang_only_lowering_fails(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolate, "missing", lambda: "tilelang is not installed")
    backend = get_backend("tilelang")
    schedule = backend.default(spec("k4v4"), "sm90")
    with pytest.raises(ToolchainMissing, match="not installed"):
        backend.lower(spec("k4v4"), schedule, "sm90")


def test_what_was_lowered_once_is_kept(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = answer(monkeypatch, json.dumps(KERNELS))
    backend = get_backend("tilelang")
    schedule = backend.default(spec("k4v4"), "sm90")
    split = Schedule("tilelang", schedule.layout, Params({**schedule.launch, "splits": "wave"}))
    texts = [backend.lower(spec("k4v4"), s, "sm90").text for s in (schedule, schedule, split)]
    assert len(requests) == 1
    assert texts[0] == texts[1] != texts[2]
    monkeypatch.setattr(isolate, "missing", lambda: "tilelang is not installed")
    assert backend.lower(spec("k4v4"), schedule, "sm90").text == texts[0]


def test_the_look_up_and_the_module_have_the_same_numbers_of_a_wave(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, json.dumps(KERNELS))
    backend = get_backend("tilelang")
    schedule = backend.default(spec("k4v4"), "sm90")
    waves, text = backend.tiling(spec("k4v4"), schedule, "sm90"), backend.lower(spec("k4v4"), schedule, "sm90").text
    for name, number in (("kWaveBytes", waves.wave_bytes), ("kTileBytes", waves.tile_bytes), ("kCtasPerSm", waves.ctas_per_sm)):
        assert f"{name} = {number};" in text


@pytest.mark.parametrize("content", ["null", "[]", "{}", "{"])
def test_a_lowered_file_that_is_damaged_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "lowered.json").write_text(content)
    assert isolate._read(tmp_path / "lowered.json") is None


def test_name_arch_and_workloads_leave_no_trace(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, json.dumps(KERNELS))
    backend = get_backend("tilelang")
    first = spec("k4v4")
    other = replace(first, name="another", arch="native", workloads=(workload_of("1x100"),))
    schedule = backend.default(first, "sm90")
    assert backend.lower(first, schedule, "sm90").id == backend.lower(other, schedule, "sm90").id
    assert backend.lower(first, schedule, "sm90").id != backend.lower(first, schedule, "sm80").id


def test_a_failure_of_tilelang_is_a_compile_error(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = get_backend("tilelang")
    schedule = backend.default(spec("k4v4"), "sm90")
    answer(monkeypatch, returncode=-6)
    with pytest.raises(CompileError, match="it broke"):
        backend.lower(spec("k4v4"), schedule, "sm90")
    answer(monkeypatch, error=subprocess.TimeoutExpired("python", 1.0))
    with pytest.raises(CompileError, match="stopped"):
        backend.lower(spec("k4v4"), schedule, "sm90")


def test_tilelang_keeps_its_files_in_the_cache(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The home directory may be read-only; where the user says where, that counts."""
    seen: list[str] = []

    def run(command: list[str], timeout_s: float, text: str, *, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        seen.append(env["TILELANG_CACHE_DIR"])
        return subprocess.CompletedProcess(command, 0, json.dumps(KERNELS), "")

    monkeypatch.setattr(isolate, "run", run)
    monkeypatch.delenv("TILELANG_CACHE_DIR", raising=False)
    isolate._run("{}", 1.0)
    monkeypatch.setenv("TILELANG_CACHE_DIR", "/elsewhere")
    isolate._run("{}", 1.0)
    assert seen == [str(own_cache / "tilelang"), "/elsewhere"]


def test_clusters_are_for_sm90() -> None:
    backend = get_backend("tilelang")
    schedule = backend.default(spec("k4v4"), "sm80")
    clustered = Schedule("tilelang", schedule.layout, Params({**schedule.launch, "reduction": "cluster"}))
    assert backend.space(spec("k4v4"), "sm90").check(clustered) == []
    assert any("sm80 has no clusters" in reason for reason in backend.space(spec("k4v4"), "sm80").check(clustered))


def test_a_schedule_outside_the_space_is_refused() -> None:
    backend = get_backend("tilelang")
    schedule = backend.default(spec("k4v4"), "sm90")
    wide = Schedule("tilelang", schedule.layout, Params({**schedule.launch, "warps": 16, "ctas_per_sm": 2}))
    with pytest.raises(UnsupportedError, match="shared memory"):
        backend.lower(spec("k4v4"), wide, "sm90")
    with pytest.raises(UnsupportedError, match="not for cpu"):
        backend.lower(spec("k4v4"), schedule, "cpu")


def test_what_no_launch_takes_is_refused_by_its_reason() -> None:
    many = replace(spec("k4v4"), workloads=(Workload(batch=4096, kv_len=128), Workload(batch=1, kv_len=4096)))
    for backend in ("cuda", "tilelang"):
        assert "a launch takes at most 2048 sequences" in str(refusal(get_backend(backend), many, "sm90"))


@pytest.mark.parametrize("words", ["k8v8:h64/8", "k16v8:h64/8"])
def test_the_rounding_of_q_is_left_out_only_where_it_has_an_effect_and_is_hidden(words: str) -> None:
    for backend in ("cuda", "tilelang"):
        assert all(s.launch["exact_q"] for s in get_backend(backend).space(spec(words), "sm90").schedules())


def test_a_cluster_has_no_more_splits_than_ctas() -> None:
    backend = get_backend("tilelang")
    plain = backend.default(spec("k4v4"), "sm90")
    launches = [Schedule("tilelang", plain.layout, Params({**plain.launch, "reduction": r})) for r in ("last_cta", "cluster")]
    assert [backend.tiling(spec("k4v4"), one, "sm90").most_splits for one in launches] == [256, 8]


def test_a_block_that_cannot_be_packed_is_refused_before_sizes_are_computed_from_it() -> None:
    backend, wanted = get_backend("tilelang"), spec("k4v4:kg64")
    schedule = Schedule("tilelang", Params(block=32, order="mma"), backend.default(wanted, "sm90").launch)
    with pytest.raises(UnsupportedError, match="a block of 32 tokens does not hold whole K groups of 64"):
        backend.lower(wanted, schedule, "sm90")
