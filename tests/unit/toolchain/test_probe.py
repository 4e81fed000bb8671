"""What compilers write and print, held against what becomes of it: a module, a refusal, or a failure of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgen._resources import templates
from kvgen.errors import CompileError, CompilerCrash, HostError
from kvgen.lower.base import Source
from kvgen.toolchain import ArtifactCache, build
from kvgen.toolchain import compile as compiling
from kvgen.toolchain.compilers import Compiler

ANSWER = 'extern "C" int __tvm_ffi_answer() { return 42; }\n'


def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> ArtifactCache:
    """Build a source with a compiler that is a shell script; `$out` is where it should write."""
    path = tmp_path / "bin" / "g++"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\nfor out; do :; done\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(compiling, "compiler_for", lambda _: Compiler("g++", path, "1.0"))
    cache = ArtifactCache(tmp_path / "cache")
    build(Source("int x;\n", "c++", "cpu"), cache, ptx_only=False)
    return cache


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 0", "wrote no module"),
        (': > "$out"', "wrote what is no module: it cannot be loaded: it: file too short"),
        ('head -c 5000 /dev/zero > "$out"', "wrote what is no module: it cannot be loaded: it: invalid ELF header"),
    ],
)
def test_a_compiler_that_ends_well_and_writes_garbage_is_refused_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    with pytest.raises(CompileError, match=reason):
        compiled(tmp_path, monkeypatch, script)
    assert [file for file in (tmp_path / "cache").rglob("*") if file.is_file()] == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("__attribute__((constructor)) void f() { __builtin_trap(); }\n", r"crashes when it is loaded \(SIG"),
        ("__attribute__((constructor)) void f() { *(volatile int*)0 = 1; }\n", r"crashes when it is loaded \(SIG"),
        ('extern "C" int nowhere(); extern "C" int f() { return nowhere(); }\n', "undefined symbol: nowhere"),
        ("#include <cstdlib>\n__attribute__((constructor)) void f() { std::_Exit(0); }\n", "no module: exit status 0"),
    ],
)
def test_a_module_that_does_not_load_is_refused_and_not_kept(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(CompileError, match=reason):
        build(Source(text, "c++", "cpu"), ArtifactCache(tmp_path))
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_a_module_must_export_what_its_source_promises(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path)
    assert build(Source(ANSWER, "c++", "cpu", functions=("answer",)), cache).path.is_file()
    other = Source(ANSWER + "// other\n", "c++", "cpu", functions=("answer", "decode", "pack"))
    with pytest.raises(CompileError, match="it lacks decode, pack"):
        build(other, cache)


@pytest.mark.parametrize(
    ("script", "kind", "reason"),
    [
        (
            "echo 'x.s: fatal error: cannot write: No space left on device' >&2; exit 1",
            HostError,
            "could not work in .*No space left on device",
        ),
        ("echo 'cc1plus: out of memory allocating 65536 bytes after a total of 1' >&2; exit 1", HostError, "out of memory"),
        ("kill -KILL $$", CompilerCrash, "ended by SIGKILL"),
        ("kill -SEGV $$", CompilerCrash, "ended by SIGSEGV"),
        (
            "echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1",
            CompilerCrash,
            "Killed signal terminated program cc1plus",
        ),
        ("echo \"nvcc error   : 'cicc' died due to signal 9 (Kill signal)\" >&2; exit 9", CompilerCrash, "cicc' died due to signal 9"),
    ],
)
def test_a_machine_that_fails_a_compiler_is_no_refusal_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, kind: type[HostError], reason: str
) -> None:
    with pytest.raises(HostError, match=reason) as caught:
        compiled(tmp_path, monkeypatch, script)
    assert type(caught.value) is kind
    assert [file for file in (tmp_path / "cache").rglob("*") if file.is_file()] == []


@pytest.mark.nvcc
@pytest.mark.parametrize("ptx_only", [False, True])
def test_cuda_modules_load_without_a_gpu(tmp_path: Path, ptx_only: bool) -> None:
    kernel = "__global__ void f(int* x) { *x = 1; }\n"
    text = f'#include "kvgen/ffi.hpp"\n{kernel}KVGEN_EXPORT(go) {{ f<<<1, 1>>>(nullptr); return cudaGetLastError(); }}\n'
    source = Source(text, "cuda", "sm80", (templates() / "common" / "include",), functions=("go",))
    assert build(source, ArtifactCache(tmp_path), ptx_only=ptx_only).path.is_file()
