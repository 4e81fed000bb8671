"""Facts of this machine: processors, vector registers, last-level cache, free memory, and the GPUs that this process may use.

`KVGEN_MACHINE`, a JSON object, replaces the system's answers: `{"cores": 64, "llc_bytes": 503316480, "available_bytes": 2147483648}`.
It is for virtual machines that hide their caches and for containers that show their host's processors. Tests use it to simulate another
machine: it reaches every process that kvgen starts. Only this module interprets CUDA_VISIBLE_DEVICES or asks NVML, without torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, get_args

from kvgen.errors import KvgenError

Fact = Literal["cores", "llc_bytes", "available_bytes", "vector_bits"]
LLC_BYTES = 32 << 20
"""Size of the last-level cache if the system does not report it."""
AVAILABLE_BYTES = 8 << 30
"""Free memory if the system does not report it."""
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
GROUPS = Path("/sys/fs/cgroup")


def cores() -> int:
    """Processors that this process may use."""
    return _override("cores") or len(os.sched_getaffinity(0))


def llc_bytes() -> int:
    """Size of the last-level cache that the first processor sees."""
    told = _override("llc_bytes")
    if told is not None:
        return told
    sizes = [int(line[:-1]) << 10 for file in CACHES.glob("index*/size") for line in _lines(file)[:1] if line.endswith("K")]
    return max(sizes, default=0) or LLC_BYTES


def available_bytes() -> int:
    """Memory in bytes that can be allocated without swapping, within the limits of the machine and of this process's control groups."""
    told = _override("available_bytes")
    if told is not None:
        return told
    free = [int(line.split()[1]) << 10 for line in _lines(Path("/proc/meminfo")) if line.startswith("MemAvailable:")]
    return min((*(free or [AVAILABLE_BYTES]), *_left_by_groups()))


def vector_bits() -> int:
    """Width of the processor's vector registers: 512 with AVX-512, 256 with AVX2, else 128."""
    told = _override("vector_bits")
    if told is not None:
        return told
    instructions = {word for line in cpuinfo() if line.startswith("flags") for word in line.split()}
    return 512 if "avx512f" in instructions else 256 if "avx2" in instructions else 128


def vector_registers() -> int:
    """Number of these registers: 32 with AVX-512 and on Arm, 16 on other x86 processors."""
    return 32 if vector_bits() == 512 or any(line.startswith("Features") for line in cpuinfo()) else 16


@cache
def cpuinfo() -> tuple[str, ...]:
    """What /proc/cpuinfo says of the first processor; nothing where there is no such file."""
    try:
        with open("/proc/cpuinfo") as file:
            return tuple(line.rstrip("\n") for line in takewhile(str.strip, file))
    except OSError:
        return ()


def _override(fact: Fact) -> int | None:
    """A fact of `KVGEN_MACHINE`, None if it has none. Raises KvgenError if it does not have the documented form."""
    text = os.environ.get("KVGEN_MACHINE")
    if not text:
        return None
    known = get_args(Fact)
    try:
        facts = json.loads(text)
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or not facts.keys() <= set(known) or not all(type(n) is int and n > 0 for n in facts.values()):
        raise KvgenError(f"KVGEN_MACHINE must be a JSON object of positive integers, any of {', '.join(known)}, not {text}")
    told: int | None = facts.get(fact)
    return told


def _left_by_groups() -> list[int]:
    """Free bytes within the limits of this process's control group and its parents (cgroup v2). File pages count as free."""
    left = []
    path = next((line.removeprefix("0::/") for line in _lines(Path("/proc/self/cgroup")) if line.startswith("0::/")), "")
    own = GROUPS / path
    for group in (own, *own.parents):
        most, used = (_number(_lines(group / f"memory.{name}")) for name in ("max", "current"))
        if most is not None and used is not None:
            stat = (line.split() for line in _lines(group / "memory.stat"))
            pages = (_number(words[1:]) or 0 for words in stat if words[0] in ("active_file", "inactive_file"))
            left.append(max(0, most - used + sum(pages)))
        if group == GROUPS:
            break
    return left


def _number(words: list[str]) -> int | None:
    return int(words[0]) if words and words[0].isdigit() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


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
