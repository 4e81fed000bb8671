"""From `arch` to the target that is built."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvgen import _nvml
from kvgen.arch import target_of
from kvgen.errors import ToolchainMissing
from kvgen.spec import target


class NVMLError(Exception):
    pass


def nvml(devices: dict[Any, tuple[int, int]], broken: bool = False) -> SimpleNamespace:
    """A stand-in for pynvml with devices by index or UUID."""

    def start() -> None:
        if broken:
            raise NVMLError

    def find(device: Any) -> Any:
        if device not in devices:
            raise NVMLError
        return device

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=start,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(devices),
        nvmlDeviceGetHandleByIndex=find,
        nvmlDeviceGetHandleByUUID=find,
        nvmlDeviceGetCudaComputeCapability=devices.__getitem__,
    )


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    _nvml.gpu_capability.cache_clear()
    yield
    _nvml.gpu_capability.cache_clear()


@pytest.mark.parametrize(("capability", "expected"), [((8, 0), "sm80"), ((8, 7), "sm80"), ((8, 9), "sm89"), ((9, 0), "sm90")])
def test_a_gpu_has_the_newest_target_of_its_generation(capability: tuple[int, int], expected: str) -> None:
    assert target_of(capability) == expected


@pytest.mark.parametrize(("capability", "reason"), [((7, 5), "7.5, but kvgen needs 8.0"), ((10, 0), "10.0, which kvgen has no target")])
def test_other_gpus_are_refused_with_the_reason(capability: tuple[int, int], reason: str) -> None:
    with pytest.raises(ToolchainMissing, match=reason):
        target_of(capability)


@pytest.mark.parametrize(("visible", "expected"), [("1,0", "sm90"), ("GPU-ab", "sm89"), ("", "cpu"), ("-1", "cpu"), ("7", "cpu")])
def test_native_follows_the_visible_devices(monkeypatch: pytest.MonkeyPatch, visible: str, expected: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml({0: (8, 0), 1: (9, 0), "GPU-ab": (8, 9)}))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert target.resolve("native") == expected


def test_native_is_the_cpu_without_a_driver_or_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", nvml({}, broken=True))
    assert target.resolve("native") == "cpu"
    _nvml.gpu_capability.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert target.resolve("native") == "cpu"
