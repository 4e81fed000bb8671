"""A tuning run: search, final, decision, entry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from filelock import FileLock

from kvgen.arch import Target
from kvgen.errors import CompileError, CompilerCrash, KvgenError, MeasureError, ToolchainMissing, host_errors
from kvgen.lower.backend import Backend, Sources
from kvgen.lower.schedule import Schedule
from kvgen.measure.measurement import Job
from kvgen.plaindata import Facts
from kvgen.registry import stores, user_store
from kvgen.registry.device import here
from kvgen.registry.entry import Entry, entry_key
from kvgen.registry.store import Store
from kvgen.spec import AnySpec
from kvgen.spec.target import resolve
from kvgen.toolchain import ArtifactCache
from kvgen.tune.budget import Budget, Clock
from kvgen.tune.candidate import Candidate, Record
from kvgen.tune.compile_queue import CompileQueue
from kvgen.tune.contenders import Contender, contenders, open_search, open_trial_stores, require
from kvgen.tune.decide import Decision, decide, most_finalists
from kvgen.tune.final import Final
from kvgen.tune.measuring import MeasuringLoop
from kvgen.tune.present import present_launches
from kvgen.tune.progress import Best, Phase, Progress, Watch
from kvgen.tune.register import further, make_entry, with_known
from kvgen.tune.result import TuningResult
from kvgen.tune.runner import Runner, verified
from kvgen.tune.search import Search
from kvgen.tune.warm_start import warm_starts

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

    from kvgen.tune.trial_store import TrialStore


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

    One layout for the spec, one launch per workload, of any back end. Every module that the entry names is verified in this run.
    Interrupting it registers the best that it has verified so far. Only one process at a time tunes a key; another that waited takes
    over its entry. `storage` is a database URL that several hosts share; without it studies are journals in the cache. `devices` are
    GPU indices, one worker each. `fresh`: registered entries neither start the search nor have to be beaten; finished measurements
    still count, and the present entry's accuracy of a model is carried over. `all_schedules` also searches what the spaces' hints
    exclude.

    Raises UnsupportedError, ToolchainMissing, MeasureError where no schedule is right at every workload, KeyboardInterrupt where the run
    is interrupted before one is known to be, or HostError where the disk fails: before anything is compiled if the registry or the cache
    cannot be written. What `progress` raises ends the run as it is.
    """
    target = target or resolve(spec.arch)
    found, refusals = contenders(spec, target, backends, all_schedules=all_schedules)
    store, cache, watch = store or user_store(), cache or ArtifactCache(), progress or (lambda _: None)
    store.require_writable()
    cache.require_writable()
    sources = Sources(spec, target, {c.backend.name: c.backend for c in found})
    require(sources, found, cache, compile_only=False)
    began = datetime.now(timezone.utc).isoformat(timespec="microseconds")
    run = _Run(
        sources, found, Clock(budget or Budget()), cache, watch, store, [str(refusal) for refusal in refusals], fresh=fresh
    )  # fmt: skip
    with _locked(cache, run.key, run) as waited:
        if waited:
            for one in store.find(spec):
                if one.entry is not None and one.entry.key == run.key and str(one.entry.provenance.get("date", "")) >= began:
                    return TuningResult(spec, target, one.entry, one.path, "built by another process meanwhile", reused=True)
        if runner is None:
            from kvgen.tune.isolated_runner import IsolatedRunner

            runner = IsolatedRunner(spec, target, cache.root / "tuning", devices)
        try:
            return run.go(runner, seed, storage)
        finally:
            runner.close()


@contextmanager
def _locked(cache: ArtifactCache, key: str, run: _Run) -> Iterator[bool]:
    """Hold the key's lock, which the operating system releases when its holder dies. Yields True if another process held it before."""
    file = cache.root / "tuning" / f"{key}.lock"
    with host_errors("lock", file):
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(file)
        waited = not _acquired(lock)
    if waited:
        run.tell("waiting", "another process tunes the same spec")
        with host_errors("lock", file):
            lock.acquire()
    try:
        yield waited
    finally:
        lock.release()


def _acquired(lock: FileLock) -> bool:
    """Whether a lock was free, and now is this process's."""
    try:
        lock.acquire(timeout=0)
    except TimeoutError:
        return False
    return True


class _Run:
    """The state of one run."""

    def __init__(
        self,
        sources: Sources,
        found: Sequence[Contender],
        clock: Clock,
        cache: ArtifactCache,
        watch: Watch,
        store: Store,
        refusals: list[str],
        *,
        fresh: bool,
    ) -> None:
        self.sources, self.spec, self.target = sources, sources.spec, sources.target
        self.found, self.clock, self.cache, self.watch, self.store = found, clock, cache, watch, store
        self.refusals, self.fresh = refusals, fresh
        self.defaults = found[0].at_workloads
        self.trial_stores: Mapping[tuple[str, str], TrialStore] = {}
        self.shared = False
        """Other hosts work on the same studies."""
        self.failures: Counter[str] = Counter()
        self.notes: list[str] = []
        """What the run left out besides."""
        self.known = 0
        self.planned: int | None = None
        self.key = entry_key(self.spec, self.target, here(self.target), self.spec.workloads)

    def go(self, runner: Runner, seed: int, storage: str | None) -> TuningResult:
        """Search, then decide among the finalists."""
        from kvgen.tune.shared_storage import open_database, storage_errors
        from kvgen.tune.trial_store import journal_storage

        self.shared = storage is not None
        backing = open_database(storage) if storage else journal_storage(self.cache.root / "studies" / f"{self.key}.journal")
        with storage_errors(backing):
            return self._go(runner, backing, seed)

    def _go(self, runner: Runner, backing: BaseStorage, seed: int) -> TuningResult:
        self.trial_stores = open_trial_stores(backing, self.sources, self.found, runner.policy, seed, exclusive=not self.shared)
        self.known = len(self.records())
        present = {} if self.fresh else present_launches(self.spec, self.key, self.found, self._stores())
        keep = self._keep(present)
        self.clock.final_seconds = runner.shortest_final(most_finalists(len(self.spec.workloads), len(self.found)))
        search = open_search(
            self.spec,
            self.found,
            self.trial_stores,
            self._seeds(keep),
            self.clock.trials_left,
            seed,
            timed=self.clock.budget.seconds is not None,
        )
        trials = self.clock.trials_left
        self.planned = search.left if trials is None else min(search.left, trials)
        with CompileQueue(self.sources, self.cache) as compile_queue:
            compile_queue.run_beside(runner.ready)
            interrupted = self._search(search, keep, runner, compile_queue)
            return self._finish(keep, present, runner, compile_queue, seed, interrupted=interrupted)

    def _search(self, search: Search, keep: Sequence[Candidate], runner: Runner, compile_queue: CompileQueue) -> bool:
        """Measure candidates until the budget or the space is used up. Returns whether Ctrl-C ended it."""
        loop = MeasuringLoop(
            search, self.trial_stores, runner, compile_queue, self.clock, self.tell, self._finished, shared=self.shared
        )  # fmt: skip
        try:
            try:
                loop.run(keep)
            finally:
                self._tell_uncompiled(loop.uncompiled)
        except KeyboardInterrupt:
            return True
        finally:
            compile_queue.cancel_pending()
            for trial_store in self.trial_stores.values():
                trial_store.close()
        return False

    def _finish(
        self,
        keep: Sequence[Candidate],
        present: Mapping[str, Schedule],
        runner: Runner,
        compile_queue: CompileQueue,
        seed: int,
        *,
        interrupted: bool,
    ) -> TuningResult:
        """The final, the decision and the entry. Raises KeyboardInterrupt if Ctrl-C came before any was right, or before the present
        winner was verified, which stays then.
        """
        last: list[Record] = []
        final = Final(self.spec.workloads, self.defaults, present, runner, compile_queue, self.clock, self.tell)
        if not interrupted:
            try:
                last = final.measure(self._trusted, self._refute, keep)
                interrupted = final.interrupted
            except KeyboardInterrupt:
                interrupted = True
            self.notes += [f"{schedule} was left out of the final: {reason}" for schedule, reason in final.left_out.items()]
        judged, decision = last, decide(last, self.spec.workloads, self.defaults, present, runner.compare)
        if decision is None:
            judged = [r for r in self._trusted() if (r.module, r.candidate.workload.key) in runner.passed]
            known = {record.candidate.key for record in judged}
            if interrupted and not all((schedule.id, key) in known for key, schedule in present.items()):
                raise KeyboardInterrupt
            decision = self._decide(judged, present, runner, interrupted=interrupted)
        more: list[Schedule] = []
        if not interrupted:
            try:
                more = self._further(decision, runner, compile_queue)
            except KeyboardInterrupt:  # what the final decided stands, without further launches
                interrupted = True
        if interrupted:
            compile_queue.stop()
            runner.close()
        return self._register(decision, more, compile_queue, judged, last, runner, seed, interrupted=interrupted)

    def _decide(self, judged: Sequence[Record], present: Mapping[str, Schedule], runner: Runner, *, interrupted: bool) -> Decision:
        """The decision. Raises KeyboardInterrupt or MeasureError where no layout is right at every workload."""
        decision = decide(judged, self.spec.workloads, self.defaults, present, runner.compare)
        if decision is None:
            raise KeyboardInterrupt if interrupted else self._nothing_right()
        return decision

    def _refute(self, failed: Record) -> None:
        """Replace the record of a candidate whose module fails now."""
        self.trial_stores[failed.candidate.backend, failed.candidate.workload.key].finish(failed)
        self._finished(failed)

    def records(self) -> list[Record]:
        """The records of all finished candidates."""
        return [record for trial_store in self.trial_stores.values() for record in trial_store.records.values()]

    def _trusted(self) -> list[Record]:
        """The records of schedules that were wrong at no workload."""
        wrong = {record.candidate.schedule for record in self.records() if record.kind == "wrong"}
        return [record for record in self.records() if record.candidate.schedule not in wrong]

    # --- candidates that take part whatever the search finds -----------------------------------------------------------

    def _stores(self) -> list[Store]:
        """The stores in which winners are searched: the run's own store first, each once."""
        return list({store.root: store for store in (self.store, *stores())}.values())

    def _keep(self, present: Mapping[str, Schedule]) -> list[Candidate]:
        """The defaults of every back end and the present winner at every workload: measured first, and always finalists."""
        candidates = [Candidate(c.at_workloads[work.key], work) for c in self.found for work in self.spec.workloads]
        candidates += [Candidate(present[work.key], work) for work in self.spec.workloads if work.key in present]
        return list(dict.fromkeys(candidates))

    def _known_quality(self) -> Facts:
        """What entries of the spec's format say of its accuracy; of several that say the same, that of the first store."""
        found = [one.entry for store in self._stores() for one in store.find(self.spec) if one.entry is not None]
        return {name: facts for entry in reversed(found) for name, facts in (entry.quality or {}).items()}

    def _seeds(self, keep: Sequence[Candidate]) -> list[Candidate]:
        """The candidates that are measured first."""
        more = [] if self.fresh else warm_starts(self.spec, self.target, self.found, self._stores())
        return list(dict.fromkeys([*keep, *more]))

    # --- after the search ----------------------------------------------------------------------------------------------

    def _further(self, decision: Decision, runner: Runner, compile_queue: CompileQueue) -> list[Schedule]:
        """The defaults that serve other calls beside the winners, compiled and verified; what fails is left out with a note."""
        right = []
        winners = [record.candidate.schedule for record in decision.launches.values()]
        for schedule in further(self.spec, self.target, winners, self.found[0]):
            candidate = Candidate(schedule, self.spec.workloads[0])
            self.tell("finalists", f"verifying {schedule}, for calls that the winners do not suit")
            try:
                record = verified(runner, candidate, compile_queue.artifact(schedule))
                reason = None if record.right else f"{record.kind}: {record.detail}"
            except (CompileError, CompilerCrash, ToolchainMissing) as error:
                reason = str(error)
            if reason is None:
                right.append(schedule)
            else:
                self.notes.append(f"{schedule}, which serves other calls, is left out: {reason}")
        return right

    def _nothing_right(self) -> MeasureError:
        """The error of a run without a decision: what failed, and how."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(r.kind for r in self.records()).items()))
        first = next((f": {r.candidate}: {r.kind}: {r.detail}" for r in self.records() if not r.ok), "")
        first = first or next((f": {note}" for note in self.notes), "")
        return MeasureError(f"no schedule of {self.spec.name} was right at every workload ({kinds or 'nothing was measured'}){first}")

    def _tell_uncompiled(self, uncompiled: Sequence[tuple[Candidate, str]]) -> None:
        if uncompiled:
            candidate, reason = uncompiled[0]
            what = f"{len(uncompiled)} schedules could not be compiled here, and were not judged: {candidate}: {reason}"
            self.notes.append(f"{what}; a later build tries them")

    def _register(
        self,
        decision: Decision,
        more: Sequence[Schedule],
        compile_queue: CompileQueue,
        judged: Sequence[Record],
        last: Sequence[Record],
        runner: Runner,
        seed: int,
        *,
        interrupted: bool,
    ) -> TuningResult:
        facts = {"seed": seed, "trials": self.clock.used, "seconds": round(self.clock.elapsed, 1), "policy": dict(runner.policy)}
        facts |= {"points": len(self.records()), "failed": sum(1 for record in self.records() if not record.ok)}
        entry = make_entry(self.sources, decision, more, compile_queue, judged, self.defaults, facts)
        passed = {module for module, _ in runner.passed}
        if unverified := [one for one in entry.every_launch if compile_queue.artifact(entry.schedule(one)).sha256 not in passed]:
            raise KvgenError(f"{entry.schedule(unverified[0])} was not verified")
        if entry.key != self.key:
            raise KvgenError(f"the entry's key is {entry.key}, and the run's {self.key}")
        entry = replace(entry, quality=with_known(entry.quality, self._known_quality()))
        path = self.store.put(entry)
        for launch in entry.every_launch:  # so that the first fetch does not verify them again
            artifact = compile_queue.artifact(entry.schedule(launch))
            self.cache.mark_verified(artifact, Job(self.spec, entry.schedule(launch), self.target, artifact.path).use)
        for one in self.store.find(self.spec):
            if one.entry is not None and self._replaces(one.entry):
                self.store.remove(one)
        self.tell("done", decision.why)
        return TuningResult(
            self.spec, self.target, entry, path, decision.why, tuple(self.records()), tuple(last), self.clock.used, self.known,
            self.clock.elapsed, interrupted, refusals=tuple(self.refusals), notes=tuple(self.notes),
            studies={f"{backend} {key}": trial_store.study.study_name for (backend, key), trial_store in self.trial_stores.items()},
        )  # fmt: skip

    def _replaces(self, other: Entry) -> bool:
        """Whether the run's entry takes the place of an untuned one of another key: where there was no such device, its name is empty."""
        same = other.arch == self.target and {one.workload.key for one in other.launches} == {work.key for work in self.spec.workloads}
        return same and not other.timings and other.device.get("name") in (None, "", here(self.target)["name"])

    # --- progress ----------------------------------------------------------------------------------------------------

    def _finished(self, record: Record) -> None:
        if record.kind != "ok":
            self.failures[record.kind] += 1
        self.tell("measuring", str(record.candidate.schedule))

    def tell(self, phase: Phase, note: str) -> None:
        """Report the state of the run to the caller's `progress`."""
        best: dict[str, Best] = {}
        right = [record for record in self.records() if record.ok]
        keys = [record.candidate.workload.key for record in right]
        defaults = {key: r.cost for key, r in zip(keys, right, strict=True) if r.candidate.schedule.id == self.defaults[key].id}
        for key, record in zip(keys, right, strict=True):
            if key not in best or record.cost < best[key].us:
                best[key] = Best(record.cost, str(record.candidate.schedule), defaults.get(key))
        self.watch(
            Progress(
                phase, note, self.clock.used, self.planned, self.known, self.failures.copy(), best, self.clock.elapsed, self.clock.left
            )
        )
