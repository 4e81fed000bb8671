from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvgen.arch import GPUS
from kvgen.errors import CompileError, CompilerCrash, HostError, ToolchainMissing
from kvgen.lower.backend import Source
from kvgen.toolchain import ArtifactCache, KernelResources, build
from kvgen.toolchain import compile as compiling
from kvgen.toolchain.compile import build_many, parse_ptxas, run_compiler
from kvgen.toolchain.compilers import Compiler

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
    monkeypatch.setattr(compiling, "compiler_for", lambda _: replace(real, version="99.9"))
    assert build(GOOD, ArtifactCache(tmp_path)).id != first.id


def test_compiler_errors_name_the_template_line_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        build(BAD, ArtifactCache(tmp_path))
    assert "decode.cpp.jinja:7:" in caught.value.log
    assert "undeclared" in caught.value.log
    assert list(tmp_path.glob("modules/*")) == list(tmp_path.glob("tmp/*")) == []


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


def compiled_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> ArtifactCache:
    """Build a source with a compiler that is a shell script; `$out` is where it should write."""
    path = tmp_path / "bin" / "g++"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\nfor out; do :; done\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(compiling, "compiler_for", lambda _: Compiler("g++", path, "1.0"))
    cache = ArtifactCache(tmp_path / "cache")
    build(Source("int x;\n", "c++", "cpu"), cache)
    return cache


@pytest.mark.parametrize(
    ("script", "kind", "reason"),
    [
        ("echo 'x.s: fatal error: No space left on device' >&2; exit 1", HostError, "could not work in .*No space left on device"),
        ("kill -SEGV $$", CompilerCrash, "ended by SIGSEGV"),
        ("echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1", CompilerCrash, "terminated program cc1plus"),
        ("echo \"nvcc error   : 'cicc' died due to signal 9 (Kill signal)\" >&2; exit 9", CompilerCrash, "cicc' died due to signal 9"),
    ],
)
def test_a_machine_that_fails_a_compiler_is_no_refusal_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, kind: type[HostError], reason: str
) -> None:
    with pytest.raises(HostError, match=reason) as caught:
        compiled_by(tmp_path, monkeypatch, script)
    assert type(caught.value) is kind
    assert list(tmp_path.glob("cache/modules/*")) == list(tmp_path.glob("cache/tmp/*")) == []


LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN5kvgen4fillILi64EfEEvPT0_i' for 'sm_90a'
ptxas info    : Function properties for _ZN5kvgen4fillILi64EfEEvPT0_i
    48 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 12 registers, used 1 barriers, 48 bytes stack, 256 bytes smem
ptxas info    : Compile time = 1.2 ms
ptxas info    : Compiling entry function '_ZN5kvgen4fillILi128EfEEvPT0_i' for 'sm_90a'
ptxas info    : Function properties for _ZN5kvgen4fillILi128EfEEvPT0_i
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, 396 bytes cmem[0]
"""


def test_ptxas_log_gives_resources_by_readable_kernel_name() -> None:
    kernels = parse_ptxas(LOG)
    assert kernels == {
        "fill<64, float>": KernelResources(registers=12, spill_bytes=32, shared_bytes=256, stack_bytes=48),
        "fill<128, float>": KernelResources(registers=255, spill_bytes=0, shared_bytes=0, stack_bytes=0),
    }
