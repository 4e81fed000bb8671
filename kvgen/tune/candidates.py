"""What a build chooses among: the back ends that support the spec, with their search spaces, and the registered winner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import kvgen.lower
from kvgen._resources import templates
from kvgen.arch import Target
from kvgen.digest import digest, files_digest
from kvgen.errors import ToolchainMissing, UnsupportedError
from kvgen.lower.backend import Backend, Sources, backends_for, refusal
from kvgen.lower.schedule import Schedule
from kvgen.lower.space import SearchSpace
from kvgen.registry.store import Store
from kvgen.spec import AnySpec, AnyWorkload
from kvgen.toolchain import ArtifactCache, compilers


@dataclass(frozen=True)
class Contender:
    """A back end that takes part, with its space."""

    backend: Backend
    space: SearchSpace
    defaults: tuple[Schedule, ...]
    at_workloads: Mapping[str, Schedule]
    """The default at each workload of the spec, by workload key."""


def contenders(
    spec: AnySpec, target: Target, backends: Sequence[Backend] | None = None, *, all_schedules: bool = False
) -> tuple[list[Contender], list[UnsupportedError]]:
    """The back ends that can lower the spec, in order of preference, and the refusals of the others. `all_schedules`: their spaces
    include what hints exclude.

    Raises UnsupportedError if all of them refuse the spec.
    """
    found, refusals = [], []
    for backend in backends_for(target) if backends is None else backends:
        reason = refusal(backend, spec, target)
        if reason is not None:
            refusals.append(UnsupportedError(backend.name, reason))
        else:
            space = backend.space(spec, target)
            space = space.without_hints() if all_schedules else space.searched
            at_workloads = {work.key: backend.default(spec, target, work) for work in spec.workloads}
            found.append(Contender(backend, space, backend.defaults(spec, target), at_workloads))
    if found:
        return found, refusals
    if len(refusals) == 1:
        raise refusals[0]
    raise UnsupportedError(" or ".join(one.backend for one in refusals), "; ".join(f"{one.backend}: {one.reason}" for one in refusals))


def require_toolchain(sources: Sources, found: Sequence[Contender], cache: ArtifactCache) -> None:
    """Raise ToolchainMissing if this machine cannot compile or cannot measure. Without a compiler, modules in the cache are
    sufficient.
    """
    from kvgen.runtime.device import cannot_run_here

    target = sources.target
    try:
        for source in (sources.of(c.defaults[0]) for c in found):
            if cache.named(source.id, compilers.machine(source.target)) is None:
                compilers.compiler_for(source.language)
    except ToolchainMissing as error:
        raise ToolchainMissing(f"cannot build for {target} here: {error}") from error
    if (reason := cannot_run_here(target)) is not None:
        why = "so nothing can be measured (--compile-only compiles here, to be tuned on another machine)"
        raise ToolchainMissing(f"cannot build for {target} here: {reason}, {why}")


def study_name(sources: Sources, contender: Contender, workload: AnyWorkload, policy: Mapping[str, Any]) -> str:
    """The name of a study: all that a measurement depends on: format, target, back end, workload; space, sources, compiler and policy by
    digest. Hints only choose what is measured.
    """
    space = {key: value for key, value in contender.space.to_json().items() if key in ("parameters", "constraints", "facts")}
    plain = sources.of(contender.defaults[0])
    code = [plain.id, _lowering()]
    with suppress(ToolchainMissing):  # modules in the cache need no compiler
        code.append(compilers.compiler_for(plain.language).key(plain))
    return f"{sources.spec.format_id}-{sources.target}-{contender.backend.name}-{workload.key}-{digest([space, code, dict(policy)])}"


@cache
def _lowering() -> str:
    """Digest of what decides the sources of all schedules: kvgen's lowering and templates."""
    folders = (Path(kvgen.lower.__file__).parent, templates())
    return files_digest(file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file() and file.suffix != ".pyc")


def present_launches(spec: AnySpec, key: str, found: Sequence[Contender], stores: Iterable[Store]) -> dict[str, Schedule]:
    """The launches, by workload key, of the first registered entry with this key whose schedules can be built; empty without one."""
    spaces = {c.backend.name: c.space for c in found}
    for one in (one for store in stores for one in store.find(spec)):
        if one.entry is not None and one.entry.key == key:
            launches = [(work, one.entry.schedule(launch)) for work, launch in one.entry.tuned]
            if all(schedule.backend in spaces and not spaces[schedule.backend].check(schedule, work) for work, schedule in launches):
                return {work.key: schedule for work, schedule in launches}
    return {}
