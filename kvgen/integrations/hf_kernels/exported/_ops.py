"""The libraries of this folder: which of them runs on a device, and the calls over it. `_kernel.json` lists them."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch

from kvgen.arch import cannot_run
from kvgen.errors import ToolchainMissing
from kvgen.runtime import checks
from kvgen.runtime.calls import Calls
from kvgen.runtime.executable import Executable
from kvgen.runtime.module import load
from kvgen.spec.dispatch import Call, Dispatch, Tiling

_FOLDER = Path(__file__).resolve().parent
try:
    _FACTS: Any = json.loads((_FOLDER / "_kernel.json").read_text(), object_hook=lambda facts: SimpleNamespace(**facts))
except FileNotFoundError as error:  # in kvgen's own tree, which tools like pkgutil walk
    raise ImportError("these files run in a folder that `kvgen export` wrote") from error

spec: Any = _FACTS.spec
"""What the kernels compute, as docs/spec.md of kvgen describes it: `spec.attention.q_heads`, `spec.key.bits` and so on."""

_calls: dict[torch.device, Calls] = {}
_loading = Lock()


def calls_on(device: torch.device | str | None) -> tuple[Calls, torch.device]:
    """The calls for a device, by default the CPU or the current GPU, and the device with its index.

    Raises ValueError for a device of another kind, ToolchainMissing where no library runs on it.
    """
    where = checks.usable_device(_FACTS.device_type if device is None else device)
    if where.type != _FACTS.device_type:
        raise ValueError(f"these libraries are for {_FACTS.device_type}, and the cache cannot be on {where}: load another build variant")
    with _loading:
        if where not in _calls:
            _calls[where] = _load(_fitting(where))
        return _calls[where], where


def calls_of(cache: Any) -> Calls:
    """The calls for the device of a cache. Raises TypeError for anything else."""
    device = getattr(cache, "device", None)
    found = _calls.get(device) if isinstance(device, torch.device) else None
    if found is not None:
        return found
    if not isinstance(device, torch.device):
        raise TypeError(f"cache must be a KVCache, which new_cache makes, not {type(cache).__name__}")
    return calls_on(device)[0]


def _load(build: Any) -> Calls:
    files = dict.fromkeys(launch.library for launch in build.launches)
    loaded = {file: Executable(load(_FOLDER / file), spec.attention.q_len) for file in files}
    launches = [loaded[launch.library] for launch in build.launches]
    table = build.dispatch
    tuned = [(Call(*call), index) for *call, index in table.tuned]
    return Calls(spec, build.layout, launches, Dispatch([Tiling(**vars(one)) for one in table.launches], tuned))


def _fitting(device: torch.device) -> Any:
    """The first build that runs on the device; they are listed from the newest machine on. Raises ToolchainMissing."""
    reasons = []
    for build in _FACTS.builds:
        reason = _lacks(build.instructions) if device.type == "cpu" else cannot_run(build.target, _capability(device))
        if reason is None:
            return build
        reasons.append(f"{build.name}: {reason}")
    raise ToolchainMissing(f"no library of this kernel runs on {device}: {'; '.join(reasons)}")


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _lacks(instructions: list[str]) -> str | None:
    """The instructions that this processor lacks, by their names in /proc/cpuinfo."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if instructions else []
    has = {name for line in lines if line.startswith("flags") for name in line.partition(":")[2].split()}
    absent = [name for name in instructions if name not in has]
    return f"the processor has no {', '.join(absent)}" if absent else None
