"""Exported kernels: what is in the folder, which library a device gets, what is refused. `kernels` itself: test_hf_kernels_load.py."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kvgen.arch import Target
from kvgen.errors import CheckError, HostError, KvgenError, ToolchainMissing, UnsupportedError
from kvgen.integrations.hf_kernels import export, levels, libraries, standalone
from kvgen.integrations.hf_kernels.export import Exported, export_kernel
from kvgen.lower.backends import get_backend
from kvgen.lower.base import Source
from kvgen.lower.schedule import Schedule
from kvgen.registry.entry import Entry
from kvgen.registry.select import Selection
from kvgen.runtime.calls import Calls
from kvgen.spec.dispatch import Tiling
from kvgen.toolchain import Artifact, Resources
from kvgen.tune.regression.finding import Finding
from tests.support.specs import kv4_spec

SPEC = replace(kv4_spec(), name="kv4")


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries are files of text, which nothing verifies."""

    def build_all(sources: Sequence[Source], *_: object) -> dict[str, Artifact]:
        found = {}
        for source in sources:
            file = tmp_path / f"{source.id}.so"
            file.write_bytes(b"GLIBC_2.17\0GLIBC_2.4\0GLIBCXX_3.4.9\0")
            compiler = "nvcc 13.0.88" if source.language == "cuda" else "g++ 12.2.0"
            found[source.id] = Artifact(source.id, file, Resources(compiler, 1.0))
        return found

    monkeypatch.setattr(libraries, "build_all", build_all)
    monkeypatch.setattr(libraries, "cannot_run_here", lambda target: "no GPU is here")
    monkeypatch.setattr(libraries, "_lacks", lambda level: "it is another processor")


def _export(folder: Path, *targets: Target, **options: object) -> Exported:
    return export_kernel(SPEC, targets, folder, **options)  # type: ignore[arg-type]


def _facts(done: Exported) -> dict[str, dict]:
    return {name: json.loads((done.folder / "build" / name / "_kernel.json").read_text()) for name in done.variants}


def _load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The exported module, imported as `kernels` does; its `_ops` is an attribute."""
    spec = importlib.util.spec_from_file_location("_exported_for_test", folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in [name for name in sys.modules if name.startswith(spec.name)]:
        del sys.modules[name]
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("no_compiler")
def test_gpus_share_a_folder_with_a_library_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done = _export(tmp_path / "k", "sm80", "sm90", "sm89", "cpu")
    machine = re.escape(__import__("platform").machine())
    gpu, cpu = sorted(done.variants, key=lambda name: "cpu" in name)
    assert re.fullmatch(rf"tvm-ffi0\d+-cu130-{machine}-linux", gpu)
    assert re.fullmatch(rf"tvm-ffi0\d+-cpu-{machine}-linux", cpu)
    facts = _facts(done)
    assert [build["name"] for build in facts[gpu]["builds"]] == ["sm90", "sm89", "sm80"]
    assert [build["name"] for build in facts[cpu]["builds"]] == [level.name for level in levels.cpu_levels()]
    assert facts[gpu]["builds"][0]["symbols"] == {"GLIBC": "2.17", "GLIBCXX": "3.4.9"}
    metadata = json.loads((done.folder / "build" / gpu / "metadata.json").read_text())
    assert metadata["backend"] == {"type": "cuda", "archs": ["9.0a", "8.9+PTX", "8.0+PTX"]}
    assert metadata["python-depends"] == ["tvm-ffi"]

    ops = sys.modules[_load(done.folder / "build" / gpu, monkeypatch).__name__ + "._ops"]
    got = {}
    for capability in [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0)]:
        monkeypatch.setattr(ops, "_capability", lambda device, here=capability: here)
        try:
            got[capability] = ops._fitting(torch.device("cuda", 0)).name
        except Exception as error:
            got[capability] = str(error)
    assert "no library of this kernel runs on cuda:0: sm90: sm90 code does not run" in got.pop((7, 5))
    assert got == {(8, 0): "sm80", (8, 6): "sm80", (8, 9): "sm89", (9, 0): "sm90", (10, 0): "sm89"}


@pytest.mark.usefixtures("no_compiler")
def test_a_processor_gets_the_newest_level_that_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(libraries, "cpu_levels", lambda: levels.LEVELS["x86_64"])
    done = _export(tmp_path / "k", "cpu")
    module = _load(done.folder / "build" / done.variants[0], monkeypatch)
    ops = sys.modules[f"{module.__name__}._ops"]
    cpuinfo = tmp_path / "cpuinfo"
    real, avx512 = Path, (*levels.AVX2, *levels.AVX512)
    monkeypatch.setattr(ops, "Path", lambda name: cpuinfo if name == "/proc/cpuinfo" else real(name))
    for has, want in [((*avx512, "avx512_vnni"), "x86-64-v4-vnni"), (avx512, "x86-64-v4"), (levels.AVX2, "x86-64-v3")]:
        cpuinfo.write_text(f"flags\t\t: fpu {' '.join(has)}\n")
        assert ops._fitting(torch.device("cpu")).name == want
    cpuinfo.write_text("flags\t\t: fpu sse2\n")
    with pytest.raises(Exception, match="x86-64-v3: the processor has no avx2"):
        module.new_cache(1, 128)
    with pytest.raises(ValueError, match="kernels run on the CPU and on CUDA devices"):
        module.new_cache(1, 128, "meta")
    with pytest.raises(TypeError, match="cache must be a KVCache"):
        module.attend(torch.zeros(1), None)


@pytest.mark.usefixtures("no_compiler")
def test_functions_take_what_the_methods_of_a_kernel_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done = _export(tmp_path / "k", "sm90")
    module = _load(done.folder / "build" / done.variants[0], monkeypatch)
    for name in ("attend", "decode", "new_cache", "plan", "prefill", "prepare", "unpack"):
        method = [*inspect.signature(getattr(Calls, name)).parameters.values()][1:]
        assert [*inspect.signature(getattr(module, name)).parameters.values()] == method, name
        assert name in module.__all__
    public = {name for name, value in vars(Calls).items() if inspect.isfunction(value) and not name.startswith("_")}
    operators = {"launch_at_capacity"}  # for kvgen's torch operators, of which an exported folder has none
    assert public - operators <= set(module.__all__)


def test_copies_import_only_each_other_torch_and_the_standard_library():
    files = standalone.standalone()
    assert {"__init__.py", "_ops.py", "_kvgen/__init__.py", "_kvgen/runtime/calls.py"} <= set(files)
    for place, text in files.items():
        assert "SPDX-License-Identifier: Apache-2.0" in text
        for node in ast.walk(ast.parse(text)):
            if (isinstance(node, ast.ImportFrom) and node.level == 0) or isinstance(node, ast.Import):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
                tops = {str(name).partition(".")[0] for name in names}
                assert tops <= {*sys.stdlib_module_names, "torch", "tvm_ffi"}, place


def test_a_module_that_needs_more_is_not_exported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(standalone, "ALLOWED", frozenset({"torch"}))
    with pytest.raises(KvgenError, match=r"kvgen.runtime.module imports tvm_ffi, which an exported kernel cannot rely on"):
        standalone.standalone()


@pytest.mark.usefixtures("no_compiler")
def test_an_export_is_renewed_and_nothing_else_is_overwritten(tmp_path: Path):
    folder = tmp_path / "k"
    _export(folder, "sm90")
    assert len(_export(folder, "cpu", version=3).variants) == 2
    readme = (folder / "README.md").read_text()
    assert "### sm90" in readme
    assert "Caution: nothing is tuned" in readme
    assert "version=3" in readme
    (folder / "notes.txt").write_text("mine")
    assert _export(folder, "sm90", "sm80").builds[1]["name"] == "sm80"
    assert (folder / "notes.txt").read_text() == "mine"
    with pytest.raises(KvgenError, match="holds the kernel kv4 of format .*, not other"):
        _export(folder, "sm90", name="other")
    with pytest.raises(KvgenError, match="of format"):
        export_kernel(kv4_spec(key={"bits": 8}), ["sm90"], folder, name="kv4")
    next(folder.glob("build/*cu130*/metadata.json")).write_text("{")
    with pytest.raises(KvgenError, match="is damaged"):
        _export(folder, "sm90")
    other = tmp_path / "other"
    other.mkdir()
    (other / "README.md").write_text("# mine\n")
    with pytest.raises(KvgenError, match="has other contents"):
        _export(other, "sm90")
    with pytest.raises(KvgenError, match="is a file"):
        _export(other / "README.md", "sm90")
    with pytest.raises(KvgenError, match="cannot be the name of a kernel"):
        _export(tmp_path / "new", "sm90", name="4bit")


@pytest.mark.usefixtures("no_compiler")
def test_further_launches_are_exported_with_what_decides_between_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    backend = get_backend("cuda")
    default, work = backend.default(SPEC, "sm90"), SPEC.workloads[0]
    others = (Schedule("cuda", default.layout, launch) for launch in backend.space(SPEC, "sm90").launches(default.layout, work))
    schedules = [default, next(one for one in others if one.launch != default.launch)]
    one, more = ((work, schedule, backend.lower(SPEC, schedule, "sm90"), None) for schedule in schedules)
    entry = Entry.of(SPEC, "sm90", [one], [more], device={})
    monkeypatch.setattr(libraries, "select", lambda spec, target: Selection(entry, "exact", ()))
    done = _export(tmp_path / "k", "sm90")
    (variant,) = done.variants
    (build,) = _facts(done)[variant]["builds"]
    files = {launch["library"] for launch in build["launches"]}
    assert len(files) == 2
    assert all((done.folder / "build" / variant / file).is_file() for file in files)
    assert [Tiling(**one) for one in build["dispatch"]["launches"]] == [backend.tiling(SPEC, schedule, "sm90") for schedule in schedules]
    assert build["dispatch"]["tuned"] == [[work.batch, work.kv_len, 1, work.batch * work.kv_len, 0]]


@pytest.mark.usefixtures("no_compiler")
def test_a_wrong_library_ends_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(libraries, "cannot_run_here", lambda target: None)
    monkeypatch.setattr(libraries, "check_numerics", lambda *_: Finding("numerics", "regressed", "kernel.cu: wrong: 3 is no 4"))
    with pytest.raises(CheckError, match="the library for sm90 is wrong: kernel.cu: wrong: 3 is no 4"):
        _export(tmp_path / "k", "sm90")
    assert not (tmp_path / "k").exists()


@pytest.mark.usefixtures("no_compiler")
def test_a_library_that_this_machine_runs_and_cannot_verify_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(libraries, "cannot_run_here", lambda target: None)
    monkeypatch.setattr(libraries, "check_numerics", lambda *_: Finding("numerics", "unable", "kernel.cu: oom: no room", environment=True))
    with pytest.raises(HostError, match="the library for sm90 could not be verified: kernel.cu: oom: no room"):
        _export(tmp_path / "k", "sm90")
    assert not (tmp_path / "k").exists()


def test_what_cannot_be_exported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVGEN_PTX_ONLY", "1")
    with pytest.raises(KvgenError, match="KVGEN_PTX_ONLY is set"):
        _export(tmp_path / "k", "sm90")
    monkeypatch.setattr(levels.platform, "machine", lambda: "riscv64")
    with pytest.raises(UnsupportedError, match="this processor is riscv64"):
        levels.cpu_levels()
    monkeypatch.delenv("KVGEN_PTX_ONLY")
    monkeypatch.setattr(export, "compiled", lambda *_: (_ for _ in ()).throw(ToolchainMissing("no nvcc")))
    with pytest.raises(ToolchainMissing):
        _export(tmp_path / "k", "sm90")
