from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvgen.arch import Target
from kvgen.errors import ToolchainMissing
from kvgen.lower.backend import Source
from kvgen.toolchain import compilers
from kvgen.toolchain.compilers import Compiler, find_gxx, find_nvcc

NVCC = Compiler("nvcc", Path("/opt/cuda/bin/nvcc"), "13.0.88")
GXX = Compiler("g++", Path("/usr/bin/g++"), "12.2.0")


@pytest.fixture
def fresh() -> Iterator[None]:
    find_gxx.cache_clear()
    find_nvcc.cache_clear()
    yield
    find_gxx.cache_clear()
    find_nvcc.cache_clear()


def gencode(target: Target, ptx_only: bool = False) -> str:
    flags = NVCC.flags(Source("", "cuda", target), ptx_only=ptx_only)
    return flags[flags.index("-gencode") + 1]


def test_cuda_targets_compile_for_their_architecture() -> None:
    assert gencode("sm80") == "arch=compute_80,code=[sm_80,compute_80]"
    assert gencode("sm89") == "arch=compute_89,code=[sm_89,compute_89]"
    assert gencode("sm90") == "arch=compute_90a,code=sm_90a"
    assert gencode("sm80", ptx_only=True) == "arch=compute_80,code=compute_80"


def test_key_covers_source_flags_compiler_and_mode(tmp_path: Path) -> None:
    source = Source("int x;", "cuda", "sm80")
    header = tmp_path / "a.cuh"
    header.write_text("1")
    keys = {
        NVCC.key(source),
        NVCC.key(source, ptx_only=True),
        NVCC.key(replace(source, text="int y;")),
        NVCC.key(replace(source, target="sm89")),
        NVCC.key(replace(source, flags=("-lineinfo",))),
        NVCC.key(replace(source, headers=(header,))),
        replace(NVCC, version="13.1.0").key(source),
    }
    assert len(keys) == 7
    header_key = NVCC.key(replace(source, headers=(header,)))
    header.write_text("2")
    assert NVCC.key(replace(source, headers=(header,))) != header_key


def test_key_has_what_nvcc_obeys_and_no_place_of_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source("int x;", "cuda", "sm90")
    plain = NVCC.key(source)
    assert replace(NVCC, link=("-L/venv1/lib",)).key(source) == plain
    assert replace(NVCC, host="g++ 13.2.0").key(source) != plain
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--use_fast_math")
    assert NVCC.key(source) != plain


def test_cpu_features_are_in_the_key_of_cpu_code_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = Source("", "c++", "cpu"), Source("", "cuda", "sm90")
    before = GXX.key(cpu), NVCC.key(gpu)
    monkeypatch.setattr(compilers, "cpu_features", lambda: "another machine")
    assert GXX.key(cpu) != before[0]
    assert NVCC.key(gpu) == before[1]


def test_missing_gxx_is_one_sentence(fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ToolchainMissing, match=r"^g\+\+ was not found: .*CXX") as caught:
        find_gxx()
    assert "\n" not in str(caught.value)


def program(folder: Path, script: str) -> str:
    path = folder / "cxx"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_cxx_that_does_not_exist_is_not_passed_over(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nope/g++")
    with pytest.raises(ToolchainMissing, match=r"^CXX is '/nope/g\+\+', which is not an executable: unset it, or point it at a g\+\+$"):
        find_gxx()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 1", "ends with exit status 1"),
        ("kill -9 $$", "was killed by signal 9"),
        ("echo no numbers", "does not answer -dumpversion"),
        ("", "does not answer -dumpversion"),
    ],
)
def test_a_cxx_that_is_no_gxx_is_one_sentence(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, reason: str
) -> None:
    monkeypatch.setenv("CXX", path := program(tmp_path, script))
    with pytest.raises(ToolchainMissing) as caught:
        find_gxx()
    message = str(caught.value)
    assert message.startswith(f"CXX is '{path}', which is no g++ (")
    assert reason in message
    assert "\n" not in message
    assert "returned non-zero" not in message


def test_missing_nvcc_says_where_it_was_looked_for(fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(compilers, "nvcc_wheel", lambda: None)
    with pytest.raises(ToolchainMissing, match=r"PATH, in CUDA_HOME or among the NVIDIA wheels: install kvgen\[cuda\]") as caught:
        find_nvcc()
    assert "\n" not in str(caught.value)


def fake_nvcc(folder: Path, release: str = "V13.0.88") -> Path:
    path = folder / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release 13.0, {release}'\n")
    path.chmod(0o755)
    return path


def test_nvcc_of_the_wheels_links_from_its_own_prefix(fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prefix = tmp_path / "nvidia" / "cu13"
    nvcc = fake_nvcc(prefix)
    (prefix / "nvvm" / "bin").mkdir(parents=True)
    (prefix / "nvvm" / "bin" / "cicc").touch()
    (tmp_path / "nvidia" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(compilers, "find_gxx", lambda: GXX)
    monkeypatch.setenv("PATH", "/bin-without-nvcc")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    compiler = find_nvcc()
    assert (compiler.path, compiler.link) == (nvcc, (f"-L{prefix / 'lib'}",))
    assert f"-L{prefix / 'lib'}" in compiler.command(Source("", "cuda", "sm90"), prefix / "a.cu", prefix / "a.so")


def test_nvcc_is_told_of_the_host_compiler_that_cxx_names(fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_nvcc(tmp_path / "home")
    monkeypatch.setattr(compilers, "nvcc_wheel", lambda: None)
    monkeypatch.setenv("CXX", path := program(tmp_path, "echo 13.2.0"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", "/bin-without-nvcc:/usr/bin:/bin")
    command = find_nvcc().command(Source("", "cuda", "sm90"), tmp_path / "a.cu", tmp_path / "a.so")
    assert command[command.index("-ccbin") + 1] == path
