"""`get_kernel`: looks into the registry and never tunes."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from kvgen._collect import resting
from kvgen.arch import Target
from kvgen.errors import KvgenError, RegistryMiss, ToolchainMissing
from kvgen.lower.base import Source
from kvgen.lower.schedule import layout_of
from kvgen.registry.device import machine
from kvgen.registry.entry import Code, Entry, Launch
from kvgen.registry.select import Selection, select
from kvgen.spec import KernelSpec, load_spec
from kvgen.spec.target import resolve

if TYPE_CHECKING:
    from kvgen.api.kernel import Kernel
    from kvgen.toolchain import Artifact, ArtifactCache

ENVIRONMENT = ("KVGEN_REGISTRY_DIR", "KVGEN_SITE_DIR", "KVGEN_DATA_DIR", "KVGEN_CACHE_DIR", "CUDA_VISIBLE_DEVICES")

LOG = logging.getLogger("kvgen")
"""For information that needs no action. Without a handler, Python prints messages from WARNING on to stderr."""

_kernels: dict[tuple[Any, ...], Kernel] = {}
_fetching: dict[tuple[Any, ...], Lock] = {}
os.register_at_fork(after_in_child=_fetching.clear)  # a thread that held one is not there


class FallbackWarning(UserWarning):
    """The kernel is correct but perhaps not the fastest: nothing was tuned for this format or for this machine."""


def get_kernel(spec: KernelSpec | str | Path | Mapping[str, Any]) -> Kernel:
    """The kernel registered for a spec (or a spec's file, text or mapping); the same object for the same spec.

    Takes the entry tuned for the spec's workloads, else for the nearest ones, else a back end's default schedule with a
    FallbackWarning. Compiles an entry that was not compiled here; never tunes.

    Raises SpecError for a bad spec, RegistryMiss where no back end can run the spec, ToolchainMissing where a device or the
    compiler that the kernel needs is absent, CompileError where compiling fails.
    """
    if not isinstance(spec, KernelSpec):
        spec = load_spec(spec)
    key = (spec, *map(os.environ.get, ENVIRONMENT))
    kernel = _kernels.get(key)
    if kernel is None:
        cautions: tuple[str, ...] = ()
        with _fetching.setdefault(key, Lock()):  # threads that ask for one spec at once get one kernel
            kernel = _kernels.get(key)
            if kernel is None:
                with resting():
                    kernel, cautions = _fetch(spec)
                _kernels[key] = kernel
        for caution in cautions:
            warnings.warn(f"{spec.name}: {caution} (`kvgen build` tunes for this machine)", FallbackWarning, stacklevel=2)
    return kernel


def forget() -> None:
    """Make the next `get_kernel` look into the registry again, which may have new entries."""
    _kernels.clear()


def _fetch(spec: KernelSpec) -> tuple[Kernel, tuple[str, ...]]:
    """The kernel, and the warnings for the caller."""
    target = resolve(spec.arch)
    require_device(target)
    selection = select(spec, target)
    if selection.entry is None:
        kernel, cautions = _default(spec, target, selection)
        return kernel, (*cautions, *selection.cautions)
    return _registered(spec, selection.entry, selection), selection.cautions


def require_device(target: Target) -> None:
    """Raises ToolchainMissing if code for the target cannot run on this machine. Does not initialize CUDA."""
    from kvgen.runtime.device import cannot_run_here

    if (reason := cannot_run_here(target)) is not None:
        raise ToolchainMissing(f"no kernel for {target} runs here: {reason}")


def _registered(spec: KernelSpec, entry: Entry, selection: Selection) -> Kernel:
    """The kernel of an entry: one packed layout for all back ends. Launches with the same source share a module."""
    from kvgen.api.kernel import Kernel
    from kvgen.runtime.module import load
    from kvgen.runtime.variant import Variant
    from kvgen.toolchain import ArtifactCache

    layout = entry.packed
    variants = {file: Variant(spec, layout, load(artifact.path)) for file, artifact in _artifacts(entry, ArtifactCache()).items()}
    return Kernel(spec, entry.arch, selection, layout, [(launch.workload, variants[launch.file]) for launch in entry.launches])


def _artifacts(entry: Entry, cache: ArtifactCache) -> dict[str, Artifact]:
    """The compiled launches by file: the modules that were tuned if the cache has them, else compiled from the entry's sources."""
    launches = {launch.file: launch for launch in entry.launches}
    tuned = {file: _tuned(entry, entry.codes[file], cache) for file in launches}
    sources = {file: _source(entry, launch) for file, launch in launches.items() if tuned[file] is None}
    compiled = _compiled(sources.values(), entry.arch, cache) if sources else {}
    return {file: artifact or compiled[sources[file].id] for file, artifact in tuned.items()}


def _tuned(entry: Entry, code: Code, cache: ArtifactCache) -> Artifact | None:
    """The module that was measured, if the cache has it, it runs on this machine, and the headers are unchanged."""
    if code.artifact is None or code.machine != machine(entry.arch) or code.source(entry.arch) is None:
        return None
    return cache.get(code.artifact)


def _source(entry: Entry, launch: Launch) -> Source:
    """The source to compile for a launch. If the headers have changed, the schedule is rendered again, because an old source may not fit
    new headers.
    """
    source = entry.codes[launch.file].source(entry.arch)
    if source is None:
        from kvgen.lower.backends import get_backend

        source = get_backend(launch.backend).lower(entry.spec, entry.schedule(launch), entry.arch)
    return source


def _compiled(sources: Iterable[Source], target: Target, cache: ArtifactCache) -> dict[str, Artifact]:
    """Artifacts by source id, compiled in parallel if the cache lacks them."""
    from kvgen.toolchain.pool import build_all

    def starting(count: int) -> None:
        LOG.warning("kvgen: compiling %d kernel%s for %s (first use; cached afterwards)", count, "s" if count > 1 else "", target)

    try:
        return build_all(sources, cache, starting)
    except ToolchainMissing as error:
        raise ToolchainMissing(f"the kernel is not compiled on this machine yet, and cannot be: {error}") from error


def _default(spec: KernelSpec, target: Target, selection: Selection) -> tuple[Kernel, tuple[str, ...]]:
    """The default schedule of the first back end that supports the spec, with a caution that says so."""
    from kvgen.api.kernel import Kernel
    from kvgen.lower import backends
    from kvgen.runtime.module import load
    from kvgen.runtime.variant import Variant
    from kvgen.toolchain import ArtifactCache

    reasons = []
    for name in backends.NAMES:
        try:
            backend = backends.get_backend(name)
        except KvgenError as error:
            reasons.append(str(error))
            continue
        reason = backends.refusal(backend, spec, target)
        if reason is not None:
            reasons.append(f"{name}: {reason}")
            continue
        schedule = backend.default(spec, target)
        source = backend.lower(spec, schedule, target)
        module = load(_compiled([source], target, ArtifactCache())[source.id].path)
        caution = f"nothing is tuned for this format on {target}; using {name}'s default schedule"
        layout = layout_of(spec, schedule.layout)
        return Kernel(spec, target, selection, layout, [(spec.workloads[0], Variant(spec, layout, module))]), (caution,)
    raise RegistryMiss(f"no kernel for {spec.name} on {target}: {'; '.join([*selection.why, *reasons])}")
