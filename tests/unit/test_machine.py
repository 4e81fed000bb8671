"""Facts of the machine and the GPUs that a process may use."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvgen import _machine
from kvgen._machine import available_bytes, cores, llc_bytes, vector_bits, vector_registers
from kvgen.errors import KvgenError

GIB = 1 << 30


def test_facts_can_be_replaced_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_MACHINE", '{"cores": 64, "llc_bytes": 503316480}')
    assert (cores(), llc_bytes()) == (64, 480 << 20)
    assert available_bytes() > 1 << 20


@pytest.mark.parametrize(
    ("line", "bits", "registers"),
    [
        ("flags\t\t: fpu sse2 avx avx2 avx512f", 512, 32),
        ("flags\t\t: fpu sse2 avx avx2", 256, 16),
        ("flags\t\t: fpu sse2 avx", 128, 16),
        ("Features\t: fp asimd", 128, 32),
        ("", 128, 16),
    ],
)
def test_vector_registers_are_those_of_the_instructions(monkeypatch: pytest.MonkeyPatch, line: str, bits: int, registers: int) -> None:
    monkeypatch.delenv("KVGEN_MACHINE", raising=False)
    monkeypatch.setattr(_machine, "cpuinfo", lambda: (line,))
    assert (vector_bits(), vector_registers()) == (bits, registers)


@pytest.mark.parametrize(
    "text", ["64", "[]", "cores=64", '{"core": 64}', '{"cores": 0}', '{"cores": "64"}', '{"cores": true}', '{"llc_bytes": 1.5}']
)
def test_other_words_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("KVGEN_MACHINE", text)
    with pytest.raises(
        KvgenError, match="must be a JSON object of positive integers, any of cores, llc_bytes, available_bytes, vector_bits"
    ):
        cores()


@pytest.mark.parametrize(("sizes", "largest"), [((), 32 << 20), (("32K", "491520K"), 480 << 20), (("2048K", ""), 2 << 20)])
def test_the_largest_cache_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[str, ...], largest: int) -> None:
    monkeypatch.delenv("KVGEN_MACHINE", raising=False)
    monkeypatch.setattr(_machine, "CACHES", tmp_path)
    for number, size in enumerate(sizes):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(size and size + "\n")
    assert llc_bytes() == largest


def test_control_groups_bound_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group's limit less what it uses; pages of files that it read can be given back."""
    monkeypatch.delenv("KVGEN_MACHINE", raising=False)
    lines = {"/proc/self/cgroup": ["0::/batch/job"], "/proc/meminfo": [f"MemAvailable: {64 * GIB >> 10} kB"]}
    real = _machine._lines
    monkeypatch.setattr(_machine, "_lines", lambda file: lines.get(str(file)) or real(file))
    monkeypatch.setattr(_machine, "GROUPS", tmp_path)
    assert available_bytes() == 64 * GIB
    (tmp_path / "batch" / "job").mkdir(parents=True)
    for group, most in (("batch", str(8 * GIB)), ("batch/job", "max")):
        (tmp_path / group / "memory.max").write_text(most + "\n")
        (tmp_path / group / "memory.current").write_text(f"{7 * GIB}\n")
        (tmp_path / group / "memory.stat").write_text(f"anon {GIB}\ninactive_file {4 * GIB}\nactive_file {2 * GIB}\n")
    assert available_bytes() == 7 * GIB
    (tmp_path / "batch" / "job" / "memory.max").write_text(f"{6 * GIB}\n")
    assert available_bytes() == 5 * GIB


class NVMLError(Exception):
    pass


def nvml(*names: str, broken: bool = False) -> SimpleNamespace:
    """A stand-in for pynvml whose devices have these names."""

    def start() -> None:
        if broken:
            raise NVMLError

    def find(device: Any) -> str:
        try:
            return names[device] if isinstance(device, int) else names[names.index(device)]
        except (IndexError, ValueError):
            raise NVMLError from None

    return SimpleNamespace(
        NVMLError=NVMLError, nvmlInit=start, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: len(names),
        nvmlDeviceGetHandleByIndex=find, nvmlDeviceGetHandleByUUID=find,
        nvmlDeviceGetUUID=lambda handle: handle,
        nvmlDeviceGetName=lambda handle: handle, nvmlSystemGetDriverVersion=lambda: "580.1",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("told", "visible"),
    [(None, ["0", "1"]), ("1, GPU-b", ["1", "GPU-b"]), ("", []), ("-1", []), ("0,-1,1", ["0"]), ("NoDevFiles", [])],
)
def test_gpus_are_those_that_the_environment_leaves_visible(monkeypatch: pytest.MonkeyPatch, told: str | None, visible: list[str]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml("GPU-a", "GPU-b"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if told is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
    assert _machine.visible_gpus() == visible
    names = [_machine.gpu_identity(index).get("name") for index in range(3)]
    assert names == [*({"0": "GPU-a", "1": "GPU-b"}.get(name, name) for name in visible), *[None] * (3 - len(visible))]


def test_gpus_are_chosen_among_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-12ab")
    assert _machine.named_gpus([1, 0]) == ["GPU-12ab", "3"]
    for hidden in (2, -1):
        with pytest.raises(KvgenError, match=f"there is no GPU {hidden}: 2 are visible"):
            _machine.named_gpus([0, hidden])


def test_a_gpu_has_one_uuid_whatever_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml("GPU-a", "GPU-b"))
    assert [_machine.gpu_uuid(name) for name in ("1", "GPU-b", "0", "GPU-unknown")] == ["GPU-b", "GPU-b", "GPU-a", "GPU-unknown"]


@pytest.mark.parametrize("library", [None, nvml("GPU-a", broken=True)])
def test_without_library_or_driver_no_gpu_is_found(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _machine.visible_gpus() == []
    for hidden in ("0", "GPU-other"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert _machine.gpu_identity() == {}
