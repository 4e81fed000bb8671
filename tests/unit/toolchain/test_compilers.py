from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvgen.errors import ToolchainMissing
from kvgen.lower.backend import Source
from kvgen.toolchain import compilers
from kvgen.toolchain.compilers import Compiler, find_gxx, find_nvcc

NVCC = Compiler("nvcc", Path("/opt/cuda/bin/nvcc"), "13.0.88")
GXX = Compiler("g++", Path("/usr/bin/g++"), "12.2.0")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    find_gxx.cache_clear()
    find_nvcc.cache_clear()
    yield
    find_gxx.cache_clear()
    find_nvcc.cache_clear()


def test_cuda_targets_compile_for_their_architecture() -> None:
    codes = {target: NVCC.flags(Source("", "cuda", target)) for target in ("sm80", "sm90")}
    assert "arch=compute_80,code=[sm_80,compute_80]" in codes["sm80"]
    assert "arch=compute_90a,code=sm_90a" in codes["sm90"]


def test_a_key_has_all_that_decides_the_bytes_and_no_place_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, (one, two) = Source("int x;", "cuda", "sm80"), (tmp_path / "1", tmp_path / "2")
    one.write_text("1")
    two.write_text("2")
    others = [replace(source, text="int y;"), replace(source, target="sm89"), replace(source, flags=("-lineinfo",))]
    others += [replace(source, headers=(one,)), replace(source, headers=(two,))]
    keys = {NVCC.key(each) for each in (source, *others)}
    keys |= {replace(NVCC, version="13.1.0").key(source), replace(NVCC, host="g++ 13.2.0").key(source)}
    assert replace(NVCC, link=("-L/venv1/lib",)).key(source) == NVCC.key(source)
    cpu = Source("", "c++", "cpu")
    keys.add(GXX.key(cpu))
    monkeypatch.setattr(compilers, "cpu_features", lambda: "another machine")
    keys.add(GXX.key(cpu))
    assert NVCC.key(source) in keys, "the CPU decides nothing of a GPU's code"
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--use_fast_math")
    keys.add(NVCC.key(source))
    assert len(keys) == 11


def program(path: Path, script: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("script", [None, "exit 1", "echo no numbers"])
def test_what_is_no_gxx_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None) -> None:
    path = program(tmp_path / "cxx", script) if script else "/nope/g++"
    monkeypatch.setenv("CXX", path)
    with pytest.raises(ToolchainMissing, match=f"^CXX is '{path.replace('+', '.')}', which is no g.. that answers -dumpversion: unset CXX"):
        find_gxx()


def test_compilers_that_are_missing_are_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compilers, "nvcc_wheel", lambda: None)
    for variable in ("CXX", "CUDA_HOME"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ToolchainMissing, match=r"^g\+\+ was not found: .*CXX"):
        find_gxx()
    with pytest.raises(ToolchainMissing, match=r"PATH, in CUDA_HOME or among the NVIDIA wheels: install kvgen\[cuda\]"):
        find_nvcc()


def test_nvcc_of_the_wheels_links_from_its_own_prefix_and_is_told_of_cxx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prefix = tmp_path / "nvidia" / "cu13"
    nvcc = program(prefix / "bin" / "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    program(prefix / "nvvm" / "bin" / "cicc", "")
    (tmp_path / "nvidia" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("CXX", path := program(tmp_path / "cxx", "echo 13.2.0"))
    monkeypatch.setenv("PATH", "/bin-without-nvcc:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    compiler = find_nvcc()
    command = compiler.command(Source("", "cuda", "sm90"), prefix / "a.cu", prefix / "a.so")
    assert (str(compiler.path), compiler.host) == (nvcc, "g++ 13.2.0")
    assert f"-L{prefix / 'lib'}" in command
    assert command[command.index("-ccbin") + 1] == path
