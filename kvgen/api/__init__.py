"""The API of a program: `get_kernel`, which looks into the registry and never tunes, and `build`, which tunes.

Importing it loads neither torch nor the tuner.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from kvgen.registry.select import select
from kvgen.spec import AnySpec, KernelSpec, LinearSpec, MatrixSpec, load_any_spec, load_as
from kvgen.spec.target import resolve

if TYPE_CHECKING:
    from kvgen.api.kernel import Kernel, LinearKernel, MatrixKernel
    from kvgen.tune.budget import Watch
    from kvgen.tune.tuner import TuningResult

ENVIRONMENT = ("KVGEN_REGISTRY_DIR", "KVGEN_SITE_DIR", "KVGEN_CACHE_DIR")
"""Variables that may change within a process: the others are read once."""

_kernels: dict[tuple[Any, ...], Kernel | MatrixKernel | LinearKernel] = {}
_fetching: dict[tuple[Any, ...], Lock] = {}
os.register_at_fork(after_in_child=_fetching.clear)  # a thread that held one is not there


class FallbackWarning(UserWarning):
    """The kernel is correct but perhaps not the fastest: nothing was tuned for this format or for this machine."""


def get_kernel(spec: KernelSpec | str | Path | Mapping[str, Any]) -> Kernel:
    """The kernel registered for a spec (or a spec's file, text or mapping); the same object for the same spec.

    Takes the entry tuned for the spec's workloads, else for the nearest ones, else a back end's default schedules with a FallbackWarning.
    Compiles an entry that was not compiled here; never tunes.

    A module that was not verified on this machine is verified first, once, in a process of its own.

    Raises SpecError for a bad spec, UnsupportedError where no back end can run the spec, ToolchainMissing where a device or the
    compiler that the kernel needs is absent, CompileError where compiling fails, CheckError where a module fails verification, HostError or
    MeasureError where this machine cannot verify it.
    """
    kernel: Kernel = _get(load_as(KernelSpec, spec))
    return kernel


def get_matrix_kernel(spec: MatrixSpec | str | Path | Mapping[str, Any]) -> MatrixKernel:
    """The kernel registered for operations on a matrix; see `get_kernel`."""
    kernel: MatrixKernel = _get(load_as(MatrixSpec, spec))
    return kernel


def get_linear_kernel(spec: LinearSpec | str | Path | Mapping[str, Any]) -> LinearKernel:
    """The kernel registered for a linear layer over packed weights; see `get_kernel`."""
    kernel: LinearKernel = _get(load_as(LinearSpec, spec))
    return kernel


def build(
    spec: AnySpec | str | Path | Mapping[str, Any],
    *,
    budget: str | float | None = None,
    trials: int | None = None,
    backends: Sequence[str] | None = None,
    seed: int = 0,
    storage: str | None = None,
    progress: Watch | None = None,
    all_schedules: bool = False,
) -> TuningResult:
    """Search schedules of a spec within `budget` (seconds, or text like "3m") and `trials` measurements; register the winner.

    With neither bound the whole space is measured. `backends` are names; by default all that support the spec.
    `storage` is a database URL that several hosts share. `progress` is called at every step. `all_schedules` also
    searches what the hints of the search spaces exclude.

    Returns the result: the registered entry with its timings, and why it won. The next `get_kernel` sees the entry.
    Raises SpecError, UnsupportedError, MeasureError where no schedule is right, ToolchainMissing where a compiler or a
    device is absent, KvgenError, TypeError or ValueError for wrong back ends, budgets or trials, and KeyboardInterrupt
    where there is nothing right to register yet.
    """
    from kvgen.lower.backend import get_backend
    from kvgen.tune.budget import Budget, parse_duration
    from kvgen.tune.tuner import tune

    seconds = parse_duration(budget) if isinstance(budget, str) else budget
    if isinstance(backends, str) or (backends is not None and not backends):
        raise ValueError(f'backends must be names, such as ["cuda", "tilelang"], or None for all, not {backends!r:.60}')
    chosen = [get_backend(name) for name in backends] if backends is not None else None
    try:
        return tune(
            load_any_spec(spec),
            budget=Budget(trials, seconds),
            backends=chosen,
            seed=seed,
            storage=storage,
            progress=progress,
            all_schedules=all_schedules,
        )
    finally:
        forget()


def forget() -> None:
    """Make the next `get_kernel` look into the registry again, which may have new entries."""
    global _kernels
    _kernels = {}


def _get(spec: AnySpec) -> Any:
    """The kernel that is kept for a spec, else the one that `_fetch` finds; warns once."""
    key = (spec, *map(os.environ.get, ENVIRONMENT))
    kernel = _kernels.get(key)
    if kernel is None:
        cautions: tuple[str, ...] = ()
        with _fetching.setdefault(key, Lock()):  # threads that ask for one spec at once get one kernel
            kept = _kernels  # `forget` replaces it, so that a fetch that began before does not keep what it found
            kernel = kept.get(key)
            if kernel is None:
                kernel = kept[key] = _fetch(spec)
                cautions = kernel.selection.cautions
        for caution in cautions:
            warnings.warn(f"{spec.name}: {caution} (`kvgen build` tunes for this machine)", FallbackWarning, stacklevel=3)
    return kernel


def _fetch(spec: AnySpec) -> Kernel | MatrixKernel | LinearKernel:
    """From a spec to its kernel: the target, the entry, its compiled modules, the kernel over them. Raises as `get_kernel` does."""
    from kvgen.api.kernel import Kernel, LinearKernel, MatrixKernel
    from kvgen.api.verify import Verification
    from kvgen.registry.select import modules, serving_entry
    from kvgen.runtime.device import require_device

    target = resolve(spec.arch)
    require_device(target)
    entry, selection = serving_entry(spec, target, select(spec, target))
    with Verification(entry) as verification:
        built = modules(entry, verification.add, verification.start)
        verification.finish()
    kinds: dict[type, Any] = {KernelSpec: Kernel, MatrixSpec: MatrixKernel, LinearSpec: LinearKernel}
    kernel: Kernel | MatrixKernel | LinearKernel = kinds[type(spec)](spec, entry, selection, built)
    return kernel
