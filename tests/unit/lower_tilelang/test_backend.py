"""The back end's answers, with and without TileLang."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from benchmarks.gpu_words import spec_of, workload_of
from kvgen.arch import GPUS, Target
from kvgen.errors import CompileError, ToolchainMissing, UnsupportedError
from kvgen.lower.backend import get_backend, refusal
from kvgen.lower.gpu import first_refusal
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.tilelang import isolate, support
from kvgen.spec import KernelSpec, Workload

WORDS = ("k4v4", "k8v8", "k2v2", "k4v4:h16/1", "k4v4:bf16:q4:page128", "k2v2:token", "k8v8:d64:h16/1:q2", "k4v2:page64:kg32")
KERNELS = {
    which: {"name": f"attend_{which}_kernel", "text": f"// {which}\n", "parameters": ["q", "splits"]} for which in ("static", "planned")
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


@pytest.mark.parametrize("words", WORDS)
def test_the_search_has_few_points(words: str) -> None:
    wanted = spec(words)
    space = get_backend("tilelang").space(wanted, "sm90")
    points = [len(space.launches(layout, wanted.workloads[0])) for layout in space.layouts()]
    assert any(points)
    assert sum(points) <= 96


def test_layouts_are_those_of_the_cuda_back_end() -> None:
    wanted = spec("k4v4")
    mine, other = get_backend("tilelang"), get_backend("cuda")
    assert set(mine.space(wanted, "sm90").layouts()) == set(other.space(wanted, "sm90").layouts())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("k4v4:d80", "head_dim"), ("k4v4:d256", "a warp holds the output"), ("k2v4:boost1/4", "key.boost"), ("k16v4", "key.bits"),
        ("k4v4:vg32", "a token has one scale"), ("k4v4:vchannel", "value.axis is channel"), ("k4v4:kg48", "key.group"),
        ("k4v4:cap30", "attention.softcap"), ("k4v4:window100", "attention.window"), ("k4v4:sinks", "attention.sinks"),
        ("k4v4:sink4", "cache.sink"), ("k4v4:local7", "cache.local"), ("k4v4:rollback8", "cache.rollback"),
        ("k4v4:token:page16", "cache.page"), ("k4v4:h256/1", "256 query heads"), ("k4v4:h64/2:q8", "more than 128 rows"),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_name(words: str, reason: str) -> None:
    refused = spec(words)
    assert reason in str(first_refusal(support.REFUSALS, refused))
    with pytest.raises(UnsupportedError, match=reason.split()[0]):
        get_backend("tilelang").space(refused, "sm90")


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
    schedule = backend.default(spec("k4v4"), "sm80")
    texts = [backend.lower(spec("k4v4"), schedule, "sm90").text for _ in range(2)]
    backend.lower(spec("k4v4"), schedule, "sm80")
    assert len(requests) == 1, "programs are those of every target"
    assert texts[0] == texts[1]
    monkeypatch.setattr(isolate, "missing", lambda: "tilelang is not installed")
    assert backend.lower(spec("k4v4"), schedule, "sm90").text == texts[0]


def test_the_look_up_and_the_module_have_the_same_numbers_of_a_wave(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, json.dumps(KERNELS))
    backend = get_backend("tilelang")
    schedule = backend.default(spec("k4v4"), "sm90")
    waves, text = backend.tiling(spec("k4v4"), schedule, "sm90"), backend.lower(spec("k4v4"), schedule, "sm90").text
    for name, number in (("kTileBytes", waves.tile_bytes), ("kCtasPerSm", waves.ctas_per_sm)):
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
    schedule = backend.default(first, "sm80")
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


def test_a_schedule_outside_the_space_is_refused() -> None:
    backend = get_backend("tilelang")
    schedule = backend.default(spec("k4v4"), "sm90")
    wide = Schedule("tilelang", schedule.layout, Params({**schedule.launch, "kv_tile": 128, "stages": 3}))
    with pytest.raises(UnsupportedError, match="shared memory"):
        backend.lower(spec("k4v4"), wide, "sm90")
    with pytest.raises(UnsupportedError, match="not for cpu"):
        backend.lower(spec("k4v4"), schedule, "cpu")


def test_what_no_launch_takes_is_refused_by_its_reason() -> None:
    many = replace(spec("k4v4"), workloads=(Workload(batch=4096, kv_len=128), Workload(batch=1, kv_len=4096)))
    for backend in ("cuda", "tilelang"):
        assert "a launch takes at most 2048 sequences" in str(refusal(get_backend(backend), many, "sm90"))


def test_a_block_that_cannot_be_packed_is_refused_before_sizes_are_computed_from_it() -> None:
    backend, wanted = get_backend("tilelang"), spec("k4v4:kg64")
    schedule = Schedule("tilelang", Params(block=32, order="mma"), backend.default(wanted, "sm90").launch)
    with pytest.raises(UnsupportedError, match="a block of 32 tokens does not hold whole K groups of 64"):
        backend.lower(wanted, schedule, "sm90")
