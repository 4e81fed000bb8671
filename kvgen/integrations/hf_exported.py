"""Attention over a quantized KV cache: kernels that kvgen generated, loadable with Hugging Face `kernels`.

    kernel = kernels.get_local_kernel(Path("..."))
    cache = kernel.new_cache(batch, max_len)
    kernel.prefill(cache, k, v)
    out = kernel.decode(q, k_new, v_new, cache)

`kernel.spec` says what the kernels compute: heads, dtype, bits of K and V, layout of the cache. Only torch and apache-tvm-ffi are needed.
Each function is the method of the same name of `kvgen.get_kernel(...)`, whose code is in `_kvgen`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch

from kvgen.arch import cannot_run
from kvgen.errors import CacheMismatch, KvgenError, ToolchainMissing, UnsupportedError
from kvgen.runtime import checks
from kvgen.runtime.calls import Calls
from kvgen.runtime.executable import Executable, Plan
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.module import load
from kvgen.spec.dispatch import Call, Dispatch, Tiling

__all__ = [
    "CacheMismatch",
    "KVCache",
    "KvgenError",
    "Plan",
    "ToolchainMissing",
    "UnsupportedError",
    "attend",
    "decode",
    "new_cache",
    "plan",
    "prefill",
    "prepare",
    "spec",
    "unpack",
]

_FOLDER = Path(__file__).resolve().parent
try:
    _FACTS: Any = json.loads((_FOLDER / "_kernel.json").read_text(), object_hook=lambda facts: SimpleNamespace(**facts))
except FileNotFoundError as error:  # in kvgen's own tree, which tools like pkgutil walk
    raise ImportError("these files run in a folder that `kvgen export` wrote") from error

spec: Any = _FACTS.spec
"""What the kernels compute, as docs/spec.md of kvgen describes it: `spec.attention.q_heads`, `spec.key.bits` and so on."""

_calls: dict[torch.device, Calls] = {}
_loading = Lock()


def new_cache(
    batch: int | None = None,
    max_len: int | None = None,
    device: torch.device | str | None = None,
    block_table: torch.Tensor | None = None,
    pages: int | None = None,
    *,
    like: KVCache | None = None,
) -> KVCache:
    """An empty cache for `batch` sequences of up to `max_len` tokens; with `like`, another layer over the same sequences.

    `device` defaults to the block table's, else to the CPU or the current GPU. Paged formats take a `block_table`, int32
    [batch, max_pages], into a pool of `pages` pages; without one, every sequence gets pages of its own. The cache's `advance`, `crop`,
    `reset`, `clear` and `reorder` change its lengths.

    Raises ValueError on sizes below 1 and on tables that do not fit, ToolchainMissing where no library of this folder runs on the device.
    """
    if like is not None:
        return _calls_of(like).new_cache(batch, max_len, device, block_table, pages, like=like)
    where = device if device is not None or block_table is None else block_table.device
    usable = checks.usable_device(_FACTS.device_type if where is None else where)
    return _calls_on(usable).new_cache(batch, max_len, usable, block_table, pages)


def _function(name: str, place: int) -> Callable[..., Any]:
    """The method `name` of `Calls` for the cache that is its argument number `place`."""
    method = getattr(Calls, name)

    @wraps(method)
    def call(*args: Any, **given: Any) -> Any:
        cache = args[place] if len(args) > place else given.get("cache")
        return getattr(_calls_of(cache), name)(*args, **given)

    signature = inspect.signature(method)
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # type: ignore[attr-defined]
    return call


prepare, prefill, plan, unpack = (_function(name, 0) for name in ("prepare", "prefill", "plan", "unpack"))
decode, attend = _function("decode", 3), _function("attend", 1)


def _calls_of(cache: Any) -> Calls:
    """The calls for the device of a cache. Raises TypeError for anything else."""
    device = getattr(cache, "device", None)
    if not isinstance(cache, KVCache) or device is None:
        raise TypeError(f"cache must be a KVCache, which new_cache makes, not {type(cache).__name__}")
    return _calls.get(device) or _calls_on(device)


def _calls_on(device: torch.device) -> Calls:
    """The calls for a device. Raises ValueError for a device of another kind, ToolchainMissing where no library runs on it."""
    if device.type != _FACTS.device_type:
        raise ValueError(f"these libraries are for {_FACTS.device_type}, and the cache cannot be on {device}: load another build variant")
    with _loading:
        if device not in _calls:
            build = _fitting(device)
            loaded = {file: Executable(load(_FOLDER / file), spec.attention.q_len) for file in dict.fromkeys(build.libraries)}
            table, tuned = build.dispatch, [(Call(*call), index) for *call, index in build.dispatch.tuned]
            dispatch = Dispatch([Tiling(**vars(one)) for one in table.launches], tuned)
            _calls[device] = Calls(spec, build.layout, [loaded[file] for file in build.libraries], dispatch)
        return _calls[device]


def _fitting(device: torch.device) -> Any:
    """The first build that runs on the device; they are listed from the newest machine on. Raises ToolchainMissing."""
    reasons = []
    for build in _FACTS.builds:
        if device.type == "cuda":
            reason = cannot_run(build.target, torch.cuda.get_device_capability(device))
        else:
            lines = Path("/proc/cpuinfo").read_text().splitlines() if build.instructions else []
            has = {name for line in lines if line.startswith("flags") for name in line.partition(":")[2].split()}
            absent = [name for name in build.instructions if name not in has]
            reason = f"the processor has no {', '.join(absent)}" if absent else None
        if reason is None:
            return build
        reasons.append(f"{build.name}: {reason}")
    raise ToolchainMissing(f"no library of this kernel runs on {device}: {'; '.join(reasons)}")
