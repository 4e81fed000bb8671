"""Exported kernels: what is in the folder, which library a device gets, what is refused. `kernels` itself: test_hf_kernels_load.py."""

from __future__ import annotations

import importlib.util
import inspect
import json
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kvgen.arch import Target
from kvgen.errors import CheckError, KvgenError
from kvgen.integrations import hf_kernels as export
from kvgen.integrations.hf_kernels import AVX2, AVX512, Exported, export_kernel
from kvgen.lower.backend import Source
from kvgen.runtime.calls import Calls
from kvgen.toolchain import Artifact, Resources
from tests.support.specs import kv4_spec

SPEC = replace(kv4_spec(), name="kv4")


@pytest.fixture(autouse=True)
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries are files of text, which nothing verifies."""

    def build_all(sources: Sequence[Source], *_: object) -> dict[str, Artifact]:
        found = {}
        for source in sources:
            (file := tmp_path / f"{source.id}.so").write_bytes(b"")
            found[source.id] = Artifact(source.id, file, Resources("nvcc 13.0.88" if source.language == "cuda" else "g++ 12.2.0", 1.0))
        return found

    monkeypatch.setattr(export, "build_all", build_all)
    monkeypatch.setattr(export, "cannot_run_here", lambda target: "no GPU is here")
    monkeypatch.setattr(export, "cpu_features", lambda: "")


def exported(folder: Path, *targets: Target, **options: object) -> Exported:
    return export_kernel(SPEC, targets, folder, **options)  # type: ignore[arg-type]


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The exported module, imported as `kernels` does."""
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


def test_gpus_share_a_folder_with_a_library_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done = exported(tmp_path / "k", "sm80", "sm90", "sm89")
    (variant,) = done.variants
    assert variant.endswith(f"-cu130-{platform.machine()}-linux")
    assert [build["name"] for build in done.builds] == ["sm90", "sm89", "sm80"]
    folder = done.folder / "build" / variant
    assert json.loads((folder / "metadata.json").read_text())["backend"] == {"type": "cuda", "archs": ["9.0a", "8.9+PTX", "8.0+PTX"]}
    module, got = loaded(folder, monkeypatch), {}
    for capability in [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0)]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, here=capability: here)
        try:
            got[capability] = module._fitting(torch.device("cuda", 0)).name
        except module.ToolchainMissing as error:
            got[capability] = str(error)
    assert "no library of this kernel runs on cuda:0: sm90: sm90 code does not run" in got.pop((7, 5))
    assert got == {(8, 0): "sm80", (8, 6): "sm80", (8, 9): "sm89", (9, 0): "sm90", (10, 0): "sm89"}
    for name in ("attend", "decode", "new_cache", "plan", "prefill", "prepare", "unpack"):
        of_module, of_method = (inspect.signature(getattr(place, name)).parameters.values() for place in (module, Calls))
        wanted = [(p.name, p.kind, p.default) for p in of_method if p.name != "scales"][1:]  # no export takes static scales
        assert [(p.name, p.kind, p.default) for p in of_module] == wanted, name


def test_a_processor_gets_the_newest_level_that_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    done = exported(tmp_path / "k", "cpu")
    module = loaded(done.folder / "build" / done.variants[0], monkeypatch)
    cpuinfo, real, avx512 = tmp_path / "cpuinfo", Path, (*AVX2, *AVX512)
    monkeypatch.setattr(module, "Path", lambda name: cpuinfo if name == "/proc/cpuinfo" else real(name))
    for has, want in [((*avx512, "avx512_vnni"), "x86-64-v4-vnni"), (avx512, "x86-64-v4"), (AVX2, "x86-64-v3")]:
        cpuinfo.write_text(f"flags\t\t: fpu {' '.join(has)}\n")
        assert module._fitting(torch.device("cpu")).name == want
    cpuinfo.write_text("flags\t\t: fpu sse2\n")
    with pytest.raises(module.ToolchainMissing, match="x86-64-v3: the processor has no avx2"):
        module.new_cache(1, 128)
    with pytest.raises(TypeError, match="cache must be a KVCache"):
        module.attend(torch.zeros(1), None)


def test_what_is_copied_needs_torch_and_tvm_ffi_alone():
    files = export.standalone()
    assert {"__init__.py", "_kvgen/__init__.py", "_kvgen/runtime/calls.py", "_kvgen/runtime/extend.py"} <= set(files)
    assert not any(line.lstrip().startswith("from kvgen") for text in files.values() for line in text.splitlines() if "TYPE" not in line)
    imported = {name for text in files.values() for name in re.findall(r"^ *(?:from (\w+)[\w.]* import |import (\w+))", text, re.MULTILINE)}
    assert {"".join(names) for names in imported} <= {"torch", "tvm_ffi", *sys.stdlib_module_names}


def test_an_export_is_renewed_and_nothing_else_is_overwritten(tmp_path: Path):
    folder = tmp_path / "k"
    exported(folder, "sm90")
    assert len(exported(folder, "cpu", version=3).variants) == 2
    assert "version=3" in (folder / "README.md").read_text()
    (folder / "notes.txt").write_text("mine")
    assert exported(folder, "sm90", "sm80").builds[1]["name"] == "sm80"
    assert (folder / "notes.txt").read_text() == "mine"
    with pytest.raises(KvgenError, match="holds something else than .*: other, "):
        exported(folder, "sm90", name="other")
    with pytest.raises(KvgenError, match="holds something else than"):
        export_kernel(kv4_spec(key={"bits": 8}), ["sm90"], folder, name="kv4")
    (other := tmp_path / "other").mkdir()
    (other / "README.md").write_text("# mine\n")
    with pytest.raises(KvgenError, match="holds something else than"):
        exported(other, "sm90")
    with pytest.raises(KvgenError, match="cannot be the name of a kernel"):
        exported(tmp_path / "new", "sm90", name="4bit")


def test_a_wrong_library_ends_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def wrong(*_: object) -> None:
        raise CheckError("3 is no 4")

    monkeypatch.setattr(export, "cannot_run_here", lambda target: None)
    monkeypatch.setattr(export.Verification, "add", wrong)
    with pytest.raises(CheckError, match="3 is no 4"):
        exported(tmp_path / "k", "sm90")
    assert not (tmp_path / "k").exists()
