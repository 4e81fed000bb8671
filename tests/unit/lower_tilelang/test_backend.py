"""The back end's answers, with and without TileLang."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from benchmarks.gpu_words import spec_of, workload_of
from kvgen.arch import GPUS
from kvgen.errors import CompileError, CompilerCrash, HostError, ToolchainMissing, UnsupportedError
from kvgen.lower.backend import get_backend, refusal
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.tilelang import isolate
from kvgen.spec import KernelSpec, Workload

TILELANG = get_backend("tilelang")
WORDS = ("k4v4", "k8v8", "k2v2", "k4v4:h16/1", "k4v4:bf16:q4:page128", "k2v2:token", "k8v8:d64:h16/1:q2", "k4v2:page64:kg32")
KERNELS = {
    which: {"name": f"attend_{which}_kernel", "text": f"// {which}\n", "parameters": ["q", "splits"]} for which in ("static", "planned")
}


def spec(words: str, *workloads: str) -> KernelSpec:
    return spec_of(words, "sm90", [workload_of(word) for word in workloads or ("1x4096", "8x32768")])


SPEC = spec("k4v4")
DEFAULT = TILELANG.default(SPEC, "sm90")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path))
    return tmp_path


def answer(monkeypatch: pytest.MonkeyPatch, returncode: int = 0, said: str = "it broke", error: Exception | None = None) -> list[str]:
    """Stand in for the other process; the requests that it gets."""
    requests: list[str] = []

    def run(command: list[str], timeout_s: float, text: str, **options: object) -> subprocess.CompletedProcess[str]:
        requests.append(text)
        if error is not None:
            raise error
        return subprocess.CompletedProcess(command, returncode, json.dumps(KERNELS), said)

    monkeypatch.setattr(isolate, "run", run)
    monkeypatch.setattr(isolate, "missing", lambda: None)
    return requests


@pytest.mark.parametrize("words", WORDS)
def test_the_default_is_in_a_space_of_few_points(words: str) -> None:
    wanted = spec(words)
    for target in GPUS:
        space, default = TILELANG.space(wanted, target), TILELANG.default(wanted, target)
        assert [problem for work in wanted.workloads for problem in space.doubts(default, work)] == []
        assert 0 < sum(len(space.launches(layout, wanted.workloads[0])) for layout in space.layouts()) <= 96


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
    assert reason in str(TILELANG.unsupported(spec(words), "sm90"))
    with pytest.raises(UnsupportedError, match=reason.split()[0]):
        TILELANG.space(spec(words), "sm90")


def test_a_tilelang_that_is_absent_or_too_old_is_named(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Server packages pin 0.1.12. The back end answers for specs whatever is installed, and refuses to lower."""

    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    none = "tilelang is not installed: pip install 'kvgen[tilelang]'"
    old = "tilelang 0.1.12 is installed, and its programs need 0.1.15 or newer"
    for found, why in (
        ("0.1.12", old),
        ("0.1.15", None),
        ("0.1.20", None),
        (None, none),
    ):
        monkeypatch.setattr(isolate, "version", absent if found is None else lambda _, found=found: found)
        assert TILELANG.missing() == refusal(TILELANG, SPEC, "sm90") == why
        assert TILELANG.unsupported(SPEC, "sm90") is None
    with pytest.raises(ToolchainMissing, match="not installed"):
        TILELANG.lower(SPEC, DEFAULT, "sm90")


def test_what_was_lowered_once_is_kept_for_every_target_name_and_workload(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = answer(monkeypatch)
    first = TILELANG.lower(SPEC, DEFAULT, "sm90")
    monkeypatch.setattr(isolate, "missing", lambda: "tilelang is not installed")
    other = replace(SPEC, name="another", arch="native", workloads=(workload_of("1x100"),))
    assert TILELANG.lower(other, DEFAULT, "sm90").id == first.id != TILELANG.lower(SPEC, DEFAULT, "sm80").id
    assert len(requests) == 1
    waves = TILELANG.tiling(SPEC, DEFAULT, "sm90")
    assert waves is not None
    for name, number in (("kTileBytes", waves.tile_bytes), ("kCtasPerSm", waves.ctas_per_sm)):
        assert f"{name} = {number};" in first.text, "the look-up has the numbers of the module"


@pytest.mark.parametrize("content", ["null", "[]", "{}", "{"])
def test_a_lowered_file_that_is_damaged_is_lowered_again(content: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = answer(monkeypatch)
    want = TILELANG.lower(SPEC, DEFAULT, "sm90").text
    (file,) = (own_cache / "lowered").iterdir()
    file.write_text(content)
    assert (TILELANG.lower(SPEC, DEFAULT, "sm90").text, len(requests)) == (want, 2)


@pytest.mark.parametrize(
    ("happened", "kind", "said"),
    [
        ({"returncode": -6}, CompileError, "it broke"),
        ({"error": subprocess.TimeoutExpired("python", 1.0)}, CompileError, "stopped"),
        ({"returncode": -9}, CompilerCrash, "SIGKILL"),
        ({"returncode": 1, "said": "OSError: No space left on device"}, HostError, "No space left"),
    ],
)
def test_a_failure_of_tilelang_has_its_kind(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, happened: dict[str, object], kind: type[Exception], said: str
) -> None:
    answer(monkeypatch, **happened)  # type: ignore[arg-type]
    with pytest.raises(kind, match=said):
        TILELANG.lower(SPEC, DEFAULT, "sm90")


def test_a_schedule_that_cannot_be_is_refused() -> None:
    wide = Schedule("tilelang", DEFAULT.layout, Params({**DEFAULT.launch, "kv_tile": 128, "stages": 3}))
    short = Schedule("tilelang", Params(block=32, order="mma"), DEFAULT.launch)
    for wanted, schedule, target, reason in (
        (SPEC, wide, "sm90", "shared memory"),
        (SPEC, DEFAULT, "cpu", "not for cpu"),
        (spec("k4v4:kg64"), short, "sm90", "a block of 32 tokens does not hold whole K groups of 64"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            TILELANG.lower(wanted, schedule, target)
    many = replace(SPEC, workloads=(Workload(batch=4096, kv_len=128), Workload(batch=1, kv_len=4096)))
    for name in ("cuda", "tilelang"):
        assert "a launch takes at most 2048 sequences" in str(refusal(get_backend(name), many, "sm90"))
