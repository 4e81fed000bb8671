from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvgen.arch import GPUS
from kvgen.errors import CompileError, ToolchainMissing
from kvgen.lower.base import Source
from kvgen.toolchain import ArtifactCache, build
from kvgen.toolchain import compile as compiling
from kvgen.toolchain.compile import run_compiler
from kvgen.toolchain.pool import build_many

GOOD = Source('extern "C" int answer() { return 42; }\n', "c++", "cpu")
BAD = Source('#line 7 "decode.cpp.jinja"\nint f() { return undeclared; }\n', "c++", "cpu")


def test_a_source_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ArtifactCache(tmp_path)
    first = build(GOOD, cache)
    assert first.path.read_bytes()[:4] == b"\x7fELF"
    assert first.resources.compiler.startswith("g++ ")
    monkeypatch.setattr(compiling, "run_compiler", lambda *_: pytest.fail("compiled again"))
    assert build(GOOD, ArtifactCache(tmp_path)) == first
    assert (first.path.parent / "kernel.cpp").read_text() == GOOD.text


def test_what_was_compiled_here_is_found_without_a_compiler_and_compiled_again_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(GOOD, ArtifactCache(tmp_path))
    real = compiling.compiler_for(GOOD.language)

    def missing(language: str) -> None:
        raise ToolchainMissing("g++ was not found")

    monkeypatch.setattr(compiling, "compiler_for", missing)
    assert build(GOOD, ArtifactCache(tmp_path)) == first
    with pytest.raises(ToolchainMissing):
        build(GOOD, ArtifactCache(tmp_path), ptx_only=True)
    monkeypatch.setattr(compiling, "compiler_for", lambda _: replace(real, version="99.9"))
    assert build(GOOD, ArtifactCache(tmp_path)).id != first.id


def test_compiler_errors_name_the_template_line_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        build(BAD, ArtifactCache(tmp_path))
    assert "decode.cpp.jinja:7:" in caught.value.log
    assert "undeclared" in caught.value.log
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_a_compiler_that_does_not_end_is_stopped_with_its_children(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"sh took longer than 2 s and was stopped"):
        run_compiler(["/bin/sh", "-c", f"sleep 60 & echo $! > '{tmp_path}/child'; wait"], tmp_path, 2.0)
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 20
    while running(child):
        assert time.monotonic() < deadline, "the compiler's child outlived it"
        time.sleep(0.02)


def running(process: int) -> bool:
    """Whether a process exists and has not ended; one that was killed may wait for its parent to notice."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_pool_yields_artifacts_and_refusals_by_index(tmp_path: Path) -> None:
    other = Source("int other;\n", "c++", "cpu")
    results = dict(build_many([GOOD, BAD, other], workers=2, cache=ArtifactCache(tmp_path)))
    assert isinstance(results[1], CompileError)
    assert results[0].path.is_file()
    assert results[2].path.is_file()
    assert results[0].id != results[2].id


def test_pool_asks_for_the_compiler_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(language: str) -> None:
        raise ToolchainMissing(f"no compiler for {language}")

    monkeypatch.setattr("kvgen.toolchain.pool.compiler_for", missing)
    with pytest.raises(ToolchainMissing, match="no compiler for cuda"):
        next(build_many([Source("", "cuda", "sm90")], cache=ArtifactCache(tmp_path)))


@pytest.mark.nvcc
def test_cuda_modules_compile_for_every_target_and_report_resources(tmp_path: Path) -> None:
    text = "template <int N> __global__ void fill(float* x) { x[threadIdx.x] = N; }\nvoid go(float* x) { fill<3><<<1, 32>>>(x); }\n"
    sources = [Source(text, "cuda", target) for target in GPUS]
    for _, artifact in build_many(sources, workers=2, cache=ArtifactCache(tmp_path)):
        assert not isinstance(artifact, CompileError)
        (name,) = artifact.resources.kernels
        assert name == "fill<3>"
        assert 0 < artifact.resources.kernels[name].registers <= 32
        assert artifact.resources.spill_bytes == 0
