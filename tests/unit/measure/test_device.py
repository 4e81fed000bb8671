from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvgen._machine import cores
from kvgen.measure import device
from kvgen.measure.device import cold_bytes, conditions, fingerprint, free_bytes
from kvgen.measure.memory import data_bytes, resident_bytes, threads


def test_cpu_fingerprint_is_stable_plain_data() -> None:
    facts = fingerprint("cpu")
    assert facts == fingerprint("cpu")
    assert json.loads(json.dumps(facts)) == facts
    assert facts["kind"] == "cpu"
    assert facts["cores"] == cores()
    assert facts["name"]


def test_other_features_are_another_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint("cpu")["features"]
    monkeypatch.setattr(device, "cpu_features", lambda: "flags: none")
    assert fingerprint("cpu")["features"] != before


def test_load_of_others_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (500.25, 1.0, 1.0))
    assert conditions("cpu") == {"load": 500.2}
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 500.0, 500.0))
    assert conditions("cpu") == {}


@pytest.mark.parametrize("llc", [1 << 20, 32 << 20, 480 << 20])
def test_inputs_rotate_past_the_last_cache(monkeypatch: pytest.MonkeyPatch, llc: int) -> None:
    monkeypatch.setenv("KVGEN_MACHINE", json.dumps({"llc_bytes": llc, "cores": 64}))
    assert cold_bytes("cpu") > llc
    assert (fingerprint("cpu")["llc_bytes"], fingerprint("cpu")["cores"]) == (llc, 64)


@pytest.mark.parametrize("llc", [4 << 20, 50 << 20, 126 << 20])
def test_inputs_of_a_gpu_have_many_times_its_l2(monkeypatch: pytest.MonkeyPatch, llc: int) -> None:
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(L2_cache_size=llc))
    assert cold_bytes("cuda") >= 20 * llc


def test_memory_figures_are_of_a_process() -> None:
    for figure in (resident_bytes, data_bytes):
        assert figure(os.getpid()) > 1 << 20
        assert figure(0x7FFFFFFF) == 0
    before = data_bytes(), resident_bytes()
    kept = bytearray(64 << 20)
    assert data_bytes() - before[0] >= 60 << 20
    kept[:] = b"1" * len(kept)
    assert resident_bytes() - before[1] >= 60 << 20
    assert threads() >= 1
    assert threads(0x7FFFFFFF) == 0


def test_pages_of_files_are_nobodys_resident_memory(tmp_path: Path) -> None:
    file = tmp_path / "library"
    file.write_bytes(b"1" * (64 << 20))
    before = resident_bytes()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[::4096]) > 0
        assert resident_bytes() - before < 32 << 20


def test_without_a_driver_a_gpu_has_no_facts_and_no_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert fingerprint("sm90") == {"kind": "cuda"}
    assert conditions("sm90") == {}


def test_what_torch_has_cached_of_a_gpus_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after many workloads, whose caches were of different sizes: the driver has little left, and torch gives its part back."""
    for name, answer in (("mem_get_info", (5, 140)), ("memory_reserved", 120), ("memory_allocated", 20)):
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    assert free_bytes(torch.device("cuda")) == 105
