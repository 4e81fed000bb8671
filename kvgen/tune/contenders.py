"""The inputs of a run: the back ends that support the spec, their search spaces, and the trial stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvgen.lower
from kvgen._resources import templates
from kvgen.arch import Target
from kvgen.digest import digest, files_digest
from kvgen.errors import KvgenError, ToolchainMissing, UnsupportedError
from kvgen.lower.backend import Backend, Language, Sources, backends_for, missing_backends, refusal
from kvgen.lower.schedule import Schedule, Value
from kvgen.lower.space import SearchSpace
from kvgen.spec import AnySpec, AnyWorkload
from kvgen.toolchain import ArtifactCache, compilers
from kvgen.toolchain.compile import ptx_only_default
from kvgen.tune.candidate import Candidate
from kvgen.tune.search import Search, SearchQueue, search_queues

if TYPE_CHECKING:
    import optuna

    from kvgen.tune.trial_store import TrialStore


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

    Raises ToolchainMissing if no back end for the target can be loaded, UnsupportedError if all of them refuse the spec.
    """
    found, refusals = [], []
    candidates = backends_for(target) if backends is None else backends
    for backend in candidates:
        reason = refusal(backend, spec, target)
        if reason is not None:
            refusals.append(UnsupportedError(backend.name, reason))
        else:
            space = backend.space(spec, target)
            space = space.without_hints() if all_schedules else space
            at_workloads = {work.key: backend.default(spec, target, work) for work in spec.workloads}
            found.append(Contender(backend, space, backend.defaults(spec, target), at_workloads))
    if found:
        return found, refusals
    if not refusals:
        raise no_backend(target)
    if len(refusals) == 1:
        raise refusals[0]
    raise UnsupportedError(" or ".join(one.backend for one in refusals), "; ".join(f"{one.backend}: {one.reason}" for one in refusals))


def no_backend(target: Target) -> ToolchainMissing:
    """The error that says which back ends are missing for a target, and why."""
    absent = "; ".join(missing_backends().values())
    return ToolchainMissing(f"no back end for {target} can be loaded here{': ' + absent if absent else ''}")


def require(sources: Sources, found: Sequence[Contender], cache: ArtifactCache, *, compile_only: bool) -> None:
    """Raise ToolchainMissing, in one sentence with everything that is missing, if this machine cannot compile or cannot measure.

    Without a compiler, modules from an imported archive are sufficient.
    """
    from kvgen.runtime.device import cannot_run_here

    def problem(language: Language) -> str | None:
        try:
            compilers.compiler_for(language)
        except ToolchainMissing as error:
            return str(error)
        return None

    target, needed = sources.target, [sources.of(c.defaults[0]) for c in found]
    languages = dict.fromkeys(
        source.language for source in needed if compile_only or cache.named(source.id, compilers.machine(source.target)) is None
    )
    missing = [reason for language in languages if (reason := problem(language))]
    if not compile_only and (reason := cannot_run_here(target)) is not None:
        missing.append(f"{reason}, so nothing can be measured (--compile-only compiles here, to be tuned on another machine)")
    if missing:
        raise ToolchainMissing(f"cannot {'compile' if compile_only else 'build'} for {target} here: {'; '.join(missing)}")


def study_name(sources: Sources, contender: Contender, workload: AnyWorkload, policy: Mapping[str, Any]) -> str:
    """The name of a study: all that a measurement depends on: format, target, back end, workload; space, sources, compiler and policy by
    digest.

    Hints are not part of it: they only choose what is measured.
    """
    space = {key: value for key, value in contender.space.to_json().items() if key in ("parameters", "constraints", "facts")}
    plain = sources.of(contender.defaults[0])
    code = [plain.id, _lowering()]
    with suppress(ToolchainMissing):  # imported modules need no compiler
        code.append(compilers.compiler_for(plain.language).key(plain, ptx_only=ptx_only_default()))
    return f"{sources.spec.format_id}-{sources.target}-{contender.backend.name}-{workload.key}-{digest([space, code, dict(policy)])}"


@cache
def _lowering() -> str:
    """Digest of what decides the sources of all schedules: kvgen's lowering and templates."""
    folders = (Path(kvgen.lower.__file__).parent, templates())
    return files_digest(file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file() and file.suffix != ".pyc")


def open_trial_stores(
    storage: optuna.storages.BaseStorage,
    sources: Sources,
    found: Sequence[Contender],
    policy: Mapping[str, Any],
    seed: int,
    *,
    exclusive: bool,
) -> dict[tuple[str, str], TrialStore]:
    """A trial store per (back end, workload key)."""
    from kvgen.tune.trial_store import TrialStore

    return {
        (c.backend.name, work.key): TrialStore(storage, study_name(sources, c, work, policy), c.space, work, seed, exclusive=exclusive)
        for c in found
        for work in sources.spec.workloads
    }


def open_search(
    spec: AnySpec,
    found: Sequence[Contender],
    trial_stores: Mapping[tuple[str, str], TrialStore],
    seeds: Sequence[Candidate],
    trials: int | None,
    seed: int,
    *,
    timed: bool,
) -> Search:
    """The search over all back ends, with the records of earlier runs; `seeds` come first. Raises KvgenError on an empty space."""
    every: list[SearchQueue] = []
    order: dict[str, Sequence[Value]] = {}
    for c in found:
        order |= {p.name: p.values for p in c.space.parameters}
        for layout in c.space.layouts():
            every += search_queues(layout, {work: c.space.launches(layout, work) for work in spec.workloads}, c.at_workloads, seed)
    candidates = sum(len(queue.todo) for queue in every)
    if not candidates:
        raise KvgenError(
            f"the search space of {spec.name} has no candidates: kvgen space --explain tells why, and --all-schedules lifts its hints"
        )
    known = sum(len(queue.todo.keys() & trial_stores[queue.backend, queue.workload.key].records.keys()) for queue in every)
    exhaustive = not timed and (trials is None or candidates - known <= trials)

    def suggest(queue: SearchQueue) -> Schedule | None:
        return trial_stores[queue.backend, queue.workload.key].suggest(queue.layout)

    search = Search(every, order, suggest, exhaustive)
    for trial_store in trial_stores.values():
        for record in trial_store.records.values():
            search.take(record)
    search.lead(
        [candidate for candidate in seeds if candidate.schedule.id not in trial_stores[candidate.backend, candidate.workload.key].records]
    )
    return search
