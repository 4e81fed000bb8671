"""A build: search, final, decision, entry."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import InitVar, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import FileLock
from optuna.storages import BaseStorage

from kvgen.arch import Target
from kvgen.errors import CompileError, CompilerCrash, KvgenError, MeasureError, ToolchainMissing, UnsupportedError, host_errors
from kvgen.lower.backend import Backend, Sources
from kvgen.lower.schedule import Schedule
from kvgen.measure.measurement import LEAST_ROUNDS, Candidate, Job, Key, Measurement
from kvgen.registry import stores, user_store
from kvgen.registry.entry import Entry, entry_key, here
from kvgen.registry.store import Store
from kvgen.spec import AnySpec, AnyWorkload
from kvgen.spec.target import resolve
from kvgen.toolchain import ArtifactCache
from kvgen.tune.budget import Best, Budget, Clock, Phase, Progress, Watch
from kvgen.tune.candidates import Contender, contenders, present_launches, require_toolchain, study_name
from kvgen.tune.final import LAUNCHES, decide, finalists, further, make_entry
from kvgen.tune.measuring import ROUND_SECONDS, CompileQueue, Outcome, Pipeline, Runner
from kvgen.tune.search import Search
from kvgen.tune.storage import Study, open_database, open_file, storage_errors

OVER = 1.1
"""A build that takes longer than so many times its budget says what it needs."""


@dataclass(frozen=True)
class TuningResult:
    """The registered entry and how it came about. `records` are all finished candidates, earlier builds' included."""

    spec: AnySpec
    target: Target
    entry: Entry
    path: Path
    """Where the entry is in the registry."""
    why: str
    records: tuple[Measurement, ...] = ()
    finalists: tuple[Measurement, ...] = ()
    measured: int = 0
    """Candidates measured in this build."""
    known: int = 0
    """Candidates that were finished in earlier builds."""
    seconds: float = 0.0
    interrupted: bool = False
    reused: bool = False
    """Another process built the same entry while this one waited for it."""
    refusals: tuple[str, ...] = ()
    """Back ends that do not support the spec, each with its reason."""
    notes: tuple[str, ...] = ()
    """What a build left out, each with the reason."""

    @property
    def failures(self) -> list[Measurement]:
        """Everything that was not ok."""
        return [record for record in (*self.records, *self.finalists) if not record.ok]

    def to_json(self) -> dict[str, Any]:
        """Plain data, without the samples of candidates that did not win."""
        failed = []
        for record in self.failures:
            schedule, workload = record.candidate.schedule, record.candidate.workload.key
            about = {"kind": record.kind, "schedule": schedule.to_json(), "id": schedule.id}
            failed.append({**about, "workload": workload, "detail": record.detail})
        plain = {name: getattr(self, name) for name in ("target", "why", "measured", "known", "interrupted", "reused")}
        told = {"refusals": list(self.refusals), "notes": list(self.notes), "failures": failed}
        made = {"key": self.entry.key, "path": str(self.path), "entry": self.entry.to_json(), "seconds": round(self.seconds, 3)}
        return {"spec": self.spec.name, **plain, **made, **told}


def tune(
    spec: AnySpec,
    target: Target | None = None,
    budget: Budget | None = None,
    *,
    backends: Sequence[Backend] | None = None,
    seed: int = 0,
    storage: str | None = None,
    progress: Watch | None = None,
    store: Store | None = None,
    cache: ArtifactCache | None = None,
    devices: Sequence[int] | None = None,
    runner: Runner | None = None,
    fresh: bool = False,
    all_schedules: bool = False,
) -> TuningResult:
    """Search the spaces of the back ends that support the spec, and register the winner in `store` (the user's).

    One layout for the spec, one launch per workload, of any back end. Every module that the entry names is verified in this build.
    Interrupting it registers the best that it has verified so far. Only one process at a time tunes a key; another that waited takes
    over its entry. `storage` is a database URL that several hosts share; without it studies are files in the cache. `devices` are
    GPU indices, one worker each. `fresh`: registered entries do not have to be beaten; finished measurements still count.
    `all_schedules` also searches what the spaces' hints exclude.

    Raises UnsupportedError, ToolchainMissing, MeasureError where no schedule is right at every workload, KeyboardInterrupt where it
    is interrupted before one is known to be, or HostError where the disk fails: before anything is compiled if the registry or the cache
    cannot be written. What `progress` raises ends the build as it is.
    """
    target = target or resolve(spec.arch)
    found, refusals = contenders(spec, target, backends, all_schedules=all_schedules)
    store, cache = store or user_store(), cache or ArtifactCache()
    store.require_writable()
    cache.require_writable()
    sources = Sources(spec, target, {c.backend.name: c.backend for c in found})
    require_toolchain(sources, found, cache)
    began = datetime.now(timezone.utc).isoformat(timespec="microseconds")
    build = _Build(sources, found, Clock(budget or Budget()), cache, store, progress or (lambda _: None), seed, fresh)
    with _locked(cache, build) as waited:
        for one in store.find(spec) if waited else ():
            if one.entry is not None and one.entry.key == build.key and str(one.entry.provenance.get("date", "")) >= began:
                return TuningResult(spec, target, one.entry, one.path, "built by another process meanwhile", reused=True)
        file = None if storage else cache.root / "studies" / f"{build.key}.db"
        with storage_errors(file), ExitStack() as ends:
            runner = runner or Runner(spec, target, cache.root / "tuning", devices)
            ends.callback(runner.close)
            opened = open_database(storage or "") if file is None else open_file(file)
            search = Search(
                {(c.backend.name, w): _study(opened, sources, c, w, runner, seed, storage) for c in found for w in spec.workloads}
            )
            return replace(build.run(search, runner, shared=storage is not None), refusals=tuple(map(str, refusals)))


def _study(
    opened: BaseStorage, sources: Sources, contender: Contender, work: AnyWorkload, runner: Runner, seed: int, shared: str | None
) -> Study:
    """The study of a back end at a workload. Processes that share a storage draw differently."""
    name = study_name(sources, contender, work, runner.policy)
    own = random.getrandbits(32) if shared else seed
    schedules = contender.space.schedules_at(work)
    return Study(opened, name, schedules, contender.space.parameters, own, shared=shared is not None)


@contextmanager
def _locked(cache: ArtifactCache, build: _Build) -> Iterator[bool]:
    """Hold the key's lock, which the operating system releases when its holder dies. Yields True if another process held it before."""
    file = cache.root / "tuning" / f"{build.key}.lock"
    lock, waited = FileLock(file), False
    with host_errors("lock", file):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except TimeoutError:
            waited = True
    if waited:
        build.tell("waiting", "another process tunes the same spec")
        with host_errors("lock", file):
            lock.acquire()
    try:
        yield waited
    finally:
        lock.release()


@dataclass
class _Build:
    """The state of one build."""

    sources: Sources
    found: list[Contender]
    clock: Clock
    cache: ArtifactCache
    store: Store
    watch: Watch
    seed: int
    fresh: InitVar[bool]

    def __post_init__(self, fresh: bool) -> None:
        self.spec, self.target, found = self.sources.spec, self.sources.target, self.found
        self.key = entry_key(self.spec, self.target, here(self.target), self.spec.workloads)
        self.defaults = found[0].at_workloads
        self.present: dict[str, Schedule] = {} if fresh else present_launches(self.spec, self.key, found, [self.store, *stores()])
        keep = [Candidate(c.at_workloads[work.key], work) for c in found for work in self.spec.workloads]
        keep += [Candidate(self.present[work.key], work) for work in self.spec.workloads if work.key in self.present]
        self.keep = list(dict.fromkeys(keep))
        """The defaults and the present winner: measured first, and finalists whatever the search finds."""
        self.search = Search({})
        self.failures: Counter[str] = Counter()
        self.uncompiled: list[str] = []
        self.notes: list[str] = []
        """What the build left out."""
        self.kept_at = self.final_at = 0.0
        """Seconds after which the defaults and the present winner were measured, and the search had ended."""
        self.known = 0
        self.planned: int | None = None

    @property
    def records(self) -> Mapping[Key, Measurement]:
        """The last measurement of every candidate, of any build."""
        return self.search.records

    def run(self, search: Search, runner: Runner, *, shared: bool) -> TuningResult:
        """Search, then decide among the finalists, and register. Raises KeyboardInterrupt if Ctrl-C came before any schedule was right, or
        before the present winner was verified, which stays then. Raises KvgenError on an empty space.
        """
        self.search, self.runner, self.shared, self.known = search, runner, shared, len(search.records)
        if not search.left and not search.records:
            hint = "kvgen space --explain tells why, and --all-schedules lifts its hints"
            raise KvgenError(f"the search space of {self.spec.name} has no candidates: {hint}")
        search.lead(self.keep)
        trials, interrupted, last = self.clock.trials_left, False, list[Measurement]()
        self.planned = search.left if trials is None else min(search.left, trials)
        with (
            CompileQueue(self.sources, self.cache, exclusive=runner.exclusive) as queue,
            CompileQueue(self.sources, self.cache, exclusive=runner.exclusive) as second,  # the end of the search ends the first one
        ):
            try:
                self._search(search, queue)
                self.final_at = self.clock.elapsed
                last = self._final(second)
            except KeyboardInterrupt:
                interrupted = True
            result = self._decide(last, second, interrupted=interrupted)
            second.stop()  # a default that is still compiled serves no call
            return result

    # --- the search ----------------------------------------------------------------------------------------------------

    def _search(self, search: Search, queue: CompileQueue) -> None:
        """Compile and measure candidates, on all devices, until the budget or the space is used up. What is not compiled by then is
        dropped, but for the defaults and the present winner.
        """
        must = {candidate.key for candidate in self.keep}
        pipeline = Pipeline(queue, self.runner, lambda candidate: math.inf if candidate.key in must else self.clock.measuring_left)
        try:
            while True:
                self._refill(search, pipeline)
                if pipeline.inside and not (self.clock.search_over and must.isdisjoint(pipeline.inside)):
                    if (done := pipeline.next(self.clock.search_left or None)) is not None:
                        self._take(*done)
                else:
                    break
            for record in pipeline.end():
                self._finished(record)
        except BaseException:
            pipeline.stop()
            self.runner.close()
            raise
        finally:
            search.end()
            if self.uncompiled:
                what = f"{len(self.uncompiled)} schedules could not be compiled here, and were not judged: {self.uncompiled[0]}"
                self.notes.append(f"{what}; a later build tries them")
        search.read()

    def _refill(self, search: Search, pipeline: Pipeline) -> None:
        """Start as many candidates as compilers and devices can take."""
        self.clock.needed = self._finalists(1)[1]
        room = pipeline.width - len(pipeline.inside)
        must = sum(candidate in self.keep for candidate in search.first)
        if self.clock.search_over:
            room = must
        elif (trials := self.clock.trials_left) is not None:  # nothing is compiled that would not be measured
            room = min(room, max(must, trials - len(pipeline.inside)))
        if self.shared:
            search.read()
        for candidate in search.next(room):
            self.tell("searching", str(candidate.schedule))
            pipeline.start(candidate)

    def _take(self, candidate: Candidate, outcome: Outcome) -> None:
        """Use what came of a candidate, and store it, unless this machine failed: another time or machine may compile it."""
        if isinstance(outcome, (ToolchainMissing, CompilerCrash)):
            self.uncompiled.append(f"{candidate}: {outcome}")
            return
        if isinstance(outcome, (CompileError, UnsupportedError)):
            outcome = candidate.measured("compile_error" if isinstance(outcome, CompileError) else "unsupported", str(outcome))
        if isinstance(outcome, Measurement):
            self._finished(outcome)
        elif outcome is not None:
            raise outcome

    def _finished(self, record: Measurement, used: int = 1) -> None:
        """Store a record, also in the place of an earlier one."""
        self.clock.used += used
        self.search.finish(record)
        if record.candidate in self.keep:
            self.kept_at = self.clock.elapsed
        if not record.ok:
            self.failures[record.kind] += 1
        self.tell("searching", str(record.candidate.schedule))

    # --- after the search ----------------------------------------------------------------------------------------------

    def _final(self, queue: CompileQueue) -> list[Measurement]:
        """The finalists, measured side by side.

        Earlier builds and other hosts measured modules of their own, so a finalist that this build has not verified is verified first.
        The record of one that fails is replaced, and others take its place.
        """
        while True:
            for launches in range(LAUNCHES, 0, -1):
                candidates, needed = self._finalists(launches)
                if self.clock.left is None or needed <= self.clock.left:
                    break
            for candidate in candidates:
                queue.start(candidate.schedule)
            for schedule in self.found[0].defaults:  # those that serve other calls are ready when the decision is made
                queue.start(schedule)
            entrants, left_out = [], {}
            for candidate in candidates:
                try:
                    entrants.append((candidate, queue.artifact(candidate.schedule)))
                except (CompileError, CompilerCrash, ToolchainMissing, UnsupportedError) as error:  # noqa: PERF203
                    left_out[candidate.schedule] = f"{candidate.schedule} was left out of the final: {error}"
            with queue.at_rest():
                judged = (self.runner.verify(candidate, artifact) for candidate, artifact in entrants)
                failed = next((record for record in judged if not record.ok), None)
                if failed is None:
                    self.notes += left_out.values()
                    self.tell("finalists", f"{len(entrants)} finalists are timed side by side")
                    timed = self.runner.final(entrants, self.clock.left) if entrants else []
                    passed = {one: self.runner.passed[artifact.sha256, one.workload.key] for one, artifact in entrants}
                    return [replace(record, accuracy=passed[record.candidate]) for record in timed]
            self._finished(failed, used=0)

    def _finalists(self, launches: int) -> tuple[list[Candidate], float]:
        """The finalists, with so many launches of the best layout, and the seconds that it takes to verify them and time a few rounds."""
        known = {record.key: record for record in self._trusted() if record.timed}
        candidates = finalists(known.values(), self.spec.workloads, [one for one in self.keep if one.key in known], launches)
        new = [known[one.key].seconds for one in candidates if (known[one.key].module, one.workload.key) not in self.runner.passed]
        return candidates, sum(new) + len(candidates) * LEAST_ROUNDS * ROUND_SECONDS

    def _decide(self, last: list[Measurement], queue: CompileQueue, *, interrupted: bool) -> TuningResult:
        """The decision and the entry; without a final by the search's measurements of modules that this build has verified."""
        judged, decision = last, decide(last, self.spec.workloads, self.defaults, self.present, self.runner.compare)
        if decision is None:
            judged = [r for r in self._trusted() if (r.module, r.candidate.workload.key) in self.runner.passed]
            known = {record.candidate.key for record in judged}
            decision = decide(judged, self.spec.workloads, self.defaults, self.present, self.runner.compare)
            if interrupted and (decision is None or not all((one.id, key) in known for key, one in self.present.items())):
                raise KeyboardInterrupt
        if decision is None:
            records = self.records.values()
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(r.kind for r in records).items()))
            told = [f": {r.candidate}: {r.kind}: {r.detail}" for r in records if not r.timed] + [f": {note}" for note in self.notes]
            what = f"no schedule of {self.spec.name} was right at every workload ({kinds or 'nothing was measured'})"
            raise MeasureError(f"{what}{next(iter(told), '')}")
        more: list[Schedule] = []
        if not interrupted:
            try:
                more = self._further([record.candidate.schedule for record in decision.launches.values()], queue)
            except KeyboardInterrupt:  # what the final decided stands, without further launches
                interrupted = True
        if interrupted:
            self.runner.close()
        failed = sum(not record.timed for record in self.records.values())
        facts = {"seed": self.seed, "trials": self.clock.used, "seconds": round(self.clock.elapsed, 1), "policy": dict(self.runner.policy)}
        facts |= {"points": len(self.records), "failed": failed}
        made = make_entry(self.sources, decision, more, queue.artifact, judged, self.defaults, facts)
        entry, path = self._register(made, queue)
        budget, took = self.clock.budget.seconds, self.clock.elapsed
        if budget is not None and took > OVER * budget and not interrupted:
            need = took - (self.final_at - self.kept_at)
            self.notes.append(f"it took {took:.0f} s of {budget:.0f} s: the defaults and the final alone need about {need:.0f} s here")
        self.tell("done", decision.why)
        return TuningResult(
            self.spec, self.target, entry, path, decision.why, tuple(self.records.values()), tuple(last), self.clock.used, self.known,
            self.clock.elapsed, interrupted, notes=tuple(self.notes),
        )  # fmt: skip

    def _trusted(self) -> list[Measurement]:
        """The records of schedules that were wrong at no workload."""
        wrong = {record.candidate.schedule for record in self.records.values() if record.kind == "wrong"}
        return [record for record in self.records.values() if record.candidate.schedule not in wrong]

    def _further(self, winners: Sequence[Schedule], queue: CompileQueue) -> list[Schedule]:
        """The defaults that serve other calls beside the winners, compiled and verified; what fails is left out with a note."""
        right = []
        for schedule in further(self.spec, self.target, winners, self.found[0]):
            self.tell("finalists", f"verifying {schedule}, for calls that the winners do not suit")
            try:
                record = self.runner.verify(Candidate(schedule, self.spec.workloads[0]), queue.artifact(schedule))
                reason = None if record.ok else f"{record.kind}: {record.detail}"
            except (CompileError, CompilerCrash, ToolchainMissing) as error:
                reason = str(error)
            if reason is None:
                right.append(schedule)
            else:
                self.notes.append(f"{schedule}, which serves other calls, is left out: {reason}")
        return right

    def _register(self, entry: Entry, queue: CompileQueue) -> tuple[Entry, Path]:
        """Put the entry into the store. Raises KvgenError where it names a module that this build has not verified."""
        passed = {module for module, _ in self.runner.passed}
        launches = [(schedule, queue.artifact(schedule)) for schedule in map(entry.schedule, entry.launches)]
        if unverified := [schedule for schedule, artifact in launches if artifact.sha256 not in passed]:
            raise KvgenError(f"{unverified[0]} was not verified")
        path = self.store.put(entry)
        for schedule, artifact in launches:  # so that the first fetch does not verify them again
            self.cache.mark_verified(artifact, Job(self.spec, schedule, self.target, artifact.path).use)
        return entry, path

    def tell(self, phase: Phase, note: str) -> None:
        """Report the state of the build to the caller's `progress`."""
        best: dict[str, Best] = {}
        right = sorted((record for record in self.records.values() if record.timed), key=lambda record: -record.cost)
        defaults = {key: record.cost for record in right if record.key == (self.defaults[key := record.key[1]].id, key)}
        for record in right:
            best[record.key[1]] = Best(record.cost, str(record.candidate.schedule), defaults.get(record.key[1]))
        used, left = self.clock.elapsed, self.clock.left
        self.watch(Progress(phase, note, self.clock.used, self.planned, self.known, self.failures.copy(), best, used, left))
