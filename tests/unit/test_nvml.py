"""The GPUs that a process may use."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvgen import _nvml
from kvgen.errors import KvgenError


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
    assert _nvml.visible_gpus() == visible
    names = [_nvml.gpu_identity(index).get("name") for index in range(3)]
    assert names == [*({"0": "GPU-a", "1": "GPU-b"}.get(name, name) for name in visible), *[None] * (3 - len(visible))]


def test_gpus_are_chosen_among_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-12ab")
    assert _nvml.named_gpus([1, 0]) == ["GPU-12ab", "3"]
    for hidden in (2, -1):
        with pytest.raises(KvgenError, match=f"there is no GPU {hidden}: 2 are visible"):
            _nvml.named_gpus([0, hidden])


def test_a_gpu_has_one_uuid_whatever_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml("GPU-a", "GPU-b"))
    assert [_nvml.gpu_uuid(name) for name in ("1", "GPU-b", "0", "GPU-unknown")] == ["GPU-b", "GPU-b", "GPU-a", "GPU-unknown"]


@pytest.mark.parametrize("library", [None, nvml("GPU-a", broken=True)])
def test_without_library_or_driver_no_gpu_is_found(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _nvml.visible_gpus() == []
    for hidden in ("0", "GPU-other"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert _nvml.gpu_identity() == {}
