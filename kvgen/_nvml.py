"""The GPUs that this process may use, and what NVML says of them. The only module that interprets CUDA_VISIBLE_DEVICES or asks NVML;
torch need not be imported for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import takewhile
from typing import Any

from kvgen.errors import KvgenError

HIDING = ("", "-1", "NoDevFiles")
"""Names in CUDA_VISIBLE_DEVICES that hide the devices after them."""


def visible_gpus() -> list[str]:
    """Names for NVML (an index or a UUID) of the GPUs that CUDA_VISIBLE_DEVICES leaves, in the order in which torch counts them.

    Without that variable, those that NVML finds: none without library or driver.
    """
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is not None:
        return list(takewhile(lambda name: name not in HIDING, (name.strip() for name in told.split(","))))
    with _nvml() as nvml:
        return [] if nvml is None else [str(index) for index in range(nvml.nvmlDeviceGetCount())]


def named_gpus(indices: Iterable[int]) -> list[str]:
    """Names of visible GPUs, for processes of their own, by their indices. Raises KvgenError for an index that none has."""
    chosen, visible = list(indices), visible_gpus()
    for index in chosen:
        if not 0 <= index < len(visible):
            raise KvgenError(f"there is no GPU {index}: {len(visible)} are visible")
    return [visible[index] for index in chosen]


def gpu_uuid(name: str) -> str:
    """The UUID of a GPU that `visible_gpus` names: one GPU may have several names. The name itself where NVML does not know it."""
    with _nvml() as nvml:
        found = None if nvml is None else _opened(nvml, name)
        uuid = None if found is None else ask(nvml.nvmlDeviceGetUUID, found[1])
    return name if uuid is None else str(uuid)


@cache
def gpu_capability() -> tuple[int, int] | None:
    """Compute capability (major, minor) of the first visible GPU; None without GPU, driver or NVML."""
    with nvml_device() as found:
        capability = found and ask(found[0].nvmlDeviceGetCudaComputeCapability, found[1])
    return (int(capability[0]), int(capability[1])) if capability else None


def gpu_identity(index: int = 0) -> dict[str, str]:
    """`name` and `driver` of a visible GPU; empty without GPU, driver or NVML."""
    with nvml_device(index) as found:
        if found is None:
            return {}
        nvml, handle = found
        return {"name": nvml.nvmlDeviceGetName(handle), "driver": nvml.nvmlSystemGetDriverVersion()}


@contextmanager
def nvml_device(index: int = 0) -> Iterator[tuple[Any, Any] | None]:
    """(pynvml, handle) of a visible GPU; None without library, driver or GPU."""
    names = visible_gpus()
    with _nvml() as nvml:
        yield None if nvml is None or index >= len(names) else _opened(nvml, names[index])


def ask(function: Callable[..., Any], *args: Any) -> Any:
    """An NVML answer; None where this device or driver does not give it."""
    import pynvml

    try:
        return function(*args)
    except pynvml.NVMLError:
        return None


@contextmanager
def _nvml() -> Iterator[Any]:
    """pynvml, initialized; None without library or driver."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _opened(nvml: Any, name: str) -> tuple[Any, Any] | None:
    try:
        return nvml, nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
    except nvml.NVMLError:
        return None
