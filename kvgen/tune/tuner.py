"""A tuning run: search, final, decision, entry."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from kvgen.arch import Target
from kvgen.errors import CompileError, CompilerCrash, KvgenError, MeasureError, ToolchainMissing, UnsupportedError, host_errors
from kvgen.lower.base import Backend
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.sources import Sources
from kvgen.registry import stores, user_store
from kvgen.registry.device import here
from kvgen.registry.entry import entry_key
from kvgen.registry.store import Found, Store
from kvgen.spec import AnySpec, AnyWorkload, KernelSpec
from kvgen.spec.target import resolve
from kvgen.toolchain import Artifact, ArtifactCache
from kvgen.tune.budget import AGAIN, Budget, Clock
from kvgen.tune.candidate import Candidate, Key, Record
from kvgen.tune.compile_queue import CompileQueue
from kvgen.tune.decide import Decision, decide, finalists, most_finalists, unclear
from kvgen.tune.grid import Grid, grid_of
from kvgen.tune.plan import Contender, contenders, open_search, open_trial_stores, require
from kvgen.tune.plane import Plane, Table
from kvgen.tune.progress import Best, Phase, Progress, Watch
from kvgen.tune.register import make_entry
from kvgen.tune.result import TuningResult
from kvgen.tune.runner import Runner
from kvgen.tune.search import Search
from kvgen.tune.warm_start import warm_starts

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

    from kvgen.tune.trial_store import TrialStore

AWAIT_S = 1.0
"""Seconds between two looks at what other hosts still measure, when nothing else is left."""


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
    plane: bool | None = None,
    grid: Grid | None = None,
) -> TuningResult:
    """Search the spaces of the back ends that support the spec, and register the winner in `store` (the user's).

    One layout for the spec, one launch per workload, of any back end. Interrupting the run registers the best so far. Only one
    process at a time tunes a key; another that waited takes over its entry. `storage` is a database URL that several hosts share;
    without it studies are journals in the cache. `devices` are GPU indices, one worker each. `fresh` ignores registered entries.
    `all_schedules` also searches what the spaces' hints exclude. `plane`: whether launches are measured over `grid` (the target's by
    default) for the entry's dispatch table; None: unless the budget bounds measurements alone.

    Raises UnsupportedError, ToolchainMissing, MeasureError where no schedule is right at every workload, or HostError where the
    disk fails: before anything is compiled if the registry or the cache cannot be written.
    """
    target = target or resolve(spec.arch)
    found, refusals = contenders(spec, target, backends, all_schedules=all_schedules)
    store, cache, watch = store or user_store(), cache or ArtifactCache(), progress or (lambda _: None)
    store.require_writable()
    cache.require_writable()
    sources = Sources(spec, target, {c.backend.name: c.backend for c in found})
    require(sources, found, cache, compile_only=False)
    began = datetime.now(timezone.utc).isoformat(timespec="microseconds")
    budget = budget or Budget()
    if plane is None:
        plane = budget.trials is None or budget.seconds is not None
    if plane and not isinstance(spec, KernelSpec):
        plane = False  # a kernel of a matrix is called at the shapes it was tuned for
    run = _Run(
        sources, found, Clock(budget, plane=plane), cache, watch, store, [str(refusal) for refusal in refusals],
        fresh=fresh, grid=(grid or grid_of(target)) if plane else None,
    )  # fmt: skip
    with host_errors("tune with", cache.root), _locked(cache, run.key, run) as waited:
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
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file)
    waited = False
    try:
        lock.acquire(timeout=0)
    except TimeoutError:
        waited = True
        run.tell("waiting", "another process tunes the same spec")
        lock.acquire()
    try:
        yield waited
    finally:
        with suppress(OSError):
            file.unlink()  # filelock retries on a file that was unlinked while it waited
        lock.release()


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
        grid: Grid | None,
    ) -> None:
        self.sources, self.spec, self.target = sources, sources.spec, sources.target
        self.found, self.clock, self.cache, self.watch, self.store = found, clock, cache, watch, store
        self.refusals, self.fresh, self.grid = refusals, fresh, grid
        self.default = found[0].default
        self.trial_stores: Mapping[tuple[str, str], TrialStore] = {}
        self.shared = False
        """Other hosts work on the same studies."""
        self.devices, self.exclusive = 1, True
        self.held: dict[int, set[tuple[Params, AnyWorkload]]] = defaultdict(set)
        """Layouts and workloads of which each device has measured candidates."""
        self.forgone: list[Candidate] = []
        """Candidates that another host is measuring."""
        self.failures: Counter[str] = Counter()
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
        present = {} if self.fresh else self._present()
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
        interrupted = False
        with CompileQueue(self.sources, self.cache) as compile_queue:
            compile_queue.run_beside(runner.ready)
            try:
                self._search(search, runner, compile_queue, keep)
            except KeyboardInterrupt:
                interrupted = True
            finally:
                compile_queue.cancel_pending()
                for trial_store in self.trial_stores.values():
                    trial_store.close()
            last: list[Record] = []
            if not interrupted:
                try:
                    last = self._final(runner, compile_queue, keep, present)
                except KeyboardInterrupt:
                    interrupted = True
            decision = decide(last, self.spec.workloads, self.default, present, runner.compare)
            judged = last if decision is not None else self.records()
            decision = decision or self._decide(judged, present, runner)
            table = None
            if self.grid is not None and not interrupted:
                try:
                    table = self._plane(self.grid, decision, [*self.records(), *last], runner, compile_queue)
                except KeyboardInterrupt:  # what the final decided stands, without a table
                    interrupted = True
            return self._register(decision, compile_queue, judged, last, runner, seed, table, interrupted=interrupted)

    def records(self) -> list[Record]:
        """The records of all finished candidates."""
        return [record for trial_store in self.trial_stores.values() for record in trial_store.records.values()]

    # --- search ------------------------------------------------------------------------------------------------------

    def _search(self, search: Search, runner: Runner, compile_queue: CompileQueue, first: Sequence[Candidate]) -> None:
        """Measure until the budget or the space is used up. The `first` candidates are measured whatever the budget is.

        The final's time is not touched: nothing is begun that would not be compiled by then, and nothing waited for that is not.
        """
        must = {candidate.key for candidate in first}
        window: deque[Candidate] = deque()
        running: dict[Future[Record], int] = {}
        self.devices, self.exclusive = runner.devices, runner.exclusive
        idle = list(range(runner.devices))
        depth = 2 * max(compile_queue.workers, runner.devices)
        with ThreadPoolExecutor(runner.devices, thread_name_prefix="measure") as pool:
            try:
                more = True
                while True:
                    if not window or not runner.exclusive:
                        more = self._refill(window, search, compile_queue, depth, settle=runner.exclusive and not running)
                    while idle and (candidate := self._take(window, must, compile_queue, busy=bool(running))) is not None:
                        artifact = self._compiled(candidate, search, compile_queue)
                        if artifact is not None:
                            self.clock.used += 1
                            self.tell("measuring", str(candidate.schedule))
                            device = self._nearest_device(candidate, idle)
                            running[pool.submit(runner.measure, candidate, artifact, device)] = device
                    if not running:
                        if self.clock.search_over or not (window or (more and (search.left or self.forgone))):
                            break
                        if not window and not search.left:
                            time.sleep(AWAIT_S)
                        continue
                    awaited: list[Future[Any]] = list(running)
                    if idle:  # a device without a candidate takes the next that is compiled
                        awaited += compile_queue.unfinished([one.schedule for one in window])
                    wait(awaited, return_when=FIRST_COMPLETED)
                    for future in [future for future in running if future.done()]:
                        idle.append(running.pop(future))
                        self._finish(future.result(), search)
            except BaseException:
                runner.close()
                raise
        self._read_others(search)

    def _nearest_device(self, candidate: Candidate, idle: list[int]) -> int:
        """Take an idle device, if possible one that has inputs and references of this layout and workload already."""
        inputs = (candidate.layout, candidate.workload)
        device = next((one for one in idle if inputs in self.held[one]), idle[0])
        idle.remove(device)
        self.held[device].add(inputs)
        return device

    def _take(self, window: deque[Candidate], must: set[Key], compile_queue: CompileQueue, *, busy: bool) -> Candidate | None:
        """The next candidate to measure: the first, or with a bound of time or several devices the first that is compiled, waiting for it
        unless another device is `busy`. Once the search is over, only candidates in `must`.
        """
        due = [candidate for candidate in window if not self.clock.search_over or candidate.key in must]
        chosen: int | None = 0 if due else None
        if due and (self.clock.budget.seconds is not None or self.devices > 1):
            chosen = compile_queue.first_ready([candidate.schedule for candidate in due], 0.0 if busy else self.clock.search_left or None)
        if chosen is None:
            return None
        window.remove(due[chosen])
        return due[chosen]

    def _refill(self, window: deque[Candidate], search: Search, compile_queue: CompileQueue, depth: int, *, settle: bool) -> bool:
        """Start more candidates, up to `depth` at a time; False if there is no time for any. If there is no time to compile, only
        candidates that are already compiled.
        """
        if self.clock.search_over and not search.first:
            return False
        room, left = depth - len(window), self.clock.search_left
        fresh = room if left is None else min(room, max(len(search.first), compile_queue.capacity(left)))
        claimed = self._read_others(search)
        candidates = []
        for candidate in search.next(fresh) if fresh > 0 else search.transfers(room):
            trial_store = self.trial_stores[candidate.backend, candidate.workload.key]
            if candidate.key in claimed or not trial_store.claim(candidate.schedule):
                search.forgo(candidate)
                self.forgone.append(candidate)
                continue
            compile_queue.start(candidate.schedule)
            candidates.append(candidate)
        window.extend(candidates)
        if not self.exclusive and fresh > 0:  # the next round may wait for records: compilers without work begin with what is likely in it
            for schedule in search.likely(min(compile_queue.spare, fresh - len(candidates))):
                compile_queue.start(schedule)
        if settle and candidates:
            self.tell("compiling", f"{len(candidates)} schedules")
            compile_queue.wait_idle()
        return fresh > 0 or bool(candidates)

    def _read_others(self, search: Search) -> set[Key]:
        """Use what other hosts have measured, and try what dead ones had claimed; the keys of candidates that living ones have claimed."""
        claimed: set[Key] = set()
        for trial_store in self.trial_stores.values() if self.shared else ():
            claimed |= {(identity, trial_store.workload.key) for identity in trial_store.claimed_elsewhere()}
            for record in trial_store.read():
                search.take(record)
        waiting, self.forgone = self.forgone, []
        for candidate in waiting:
            if candidate.key in claimed:
                self.forgone.append(candidate)
            elif candidate.schedule.id not in self.trial_stores[candidate.backend, candidate.workload.key].records:
                search.regain(candidate)
        return claimed

    def _compiled(self, candidate: Candidate, search: Search, compile_queue: CompileQueue) -> Artifact | None:
        """The candidate's artifact; None if it does not compile, which is recorded."""
        try:
            return compile_queue.artifact(candidate.schedule)
        except (ToolchainMissing, CompilerCrash) as error:  # another time or machine may compile it: not recorded
            self.trial_stores[candidate.backend, candidate.workload.key].release(candidate.schedule)
            search.take(Record(candidate, "unsupported", detail=str(error)))
            return None
        except (CompileError, UnsupportedError) as error:
            self.clock.used += 1
            kind = "unsupported" if isinstance(error, UnsupportedError) else "compile_error"
            self._finish(Record(candidate, kind, detail=str(error)), search)
            return None

    def _finish(self, record: Record, search: Search) -> None:
        self.trial_stores[record.candidate.backend, record.candidate.workload.key].finish(record)
        search.take(record)
        if record.kind != "ok":
            self.failures[record.kind] += 1
        self.tell("measuring", str(record.candidate.schedule))

    # --- final -------------------------------------------------------------------------------------------------------

    def _stores(self) -> list[Store]:
        """The stores in which winners are searched: the run's own store first, each once."""
        return list({store.root: store for store in (self.store, *stores())}.values())

    def _present(self) -> dict[str, Schedule]:
        """The launches of the registered winner for this key, where its schedules are still in the space."""
        spaces = {c.backend.name: c.space for c in self.found}
        for store in self._stores():
            for one in store.find(self.spec):
                launches = self._launches(one)
                checks = [spaces[s.backend].check(s, work) if s.backend in spaces else ["gone"] for work, s in launches]
                if launches and not any(checks):
                    return {work.key: schedule for work, schedule in launches}
        return {}

    def _launches(self, one: Found) -> list[tuple[AnyWorkload, Schedule]]:
        """The launches of an entry by workload; empty for an entry with another key."""
        entry = one.entry
        if entry is None or entry.key != self.key:
            return []
        return [(launch.workload, entry.schedule(launch)) for launch in entry.launches]

    def _keep(self, present: Mapping[str, Schedule]) -> list[Candidate]:
        """The defaults of every back end and the present winner at every workload: measured first, and always finalists."""
        candidates = [Candidate(c.default, work) for c in self.found for work in self.spec.workloads]
        candidates += [Candidate(present[work.key], work) for work in self.spec.workloads if work.key in present]
        return list(dict.fromkeys(candidates))

    def _seeds(self, keep: Sequence[Candidate]) -> list[Candidate]:
        """The candidates that are measured first."""
        more = [] if self.fresh else warm_starts(self.spec, self.target, self.found, self._stores())
        return list(dict.fromkeys([*keep, *more]))

    def _final(
        self, runner: Runner, compile_queue: CompileQueue, keep: Sequence[Candidate], present: Mapping[str, Schedule]
    ) -> list[Record]:
        right = {record.candidate.key for record in self.records() if record.ok}
        candidates = finalists(self.records(), self.spec.workloads, [candidate for candidate in keep if candidate.key in right])
        for candidate in candidates:
            compile_queue.start(candidate.schedule)
        if runner.exclusive:
            compile_queue.wait_idle()
        self.tell("finalists", f"{len(candidates)} finalists are timed side by side")
        entrants = [(candidate, compile_queue.artifact(candidate.schedule)) for candidate in candidates]
        left = self.clock.final_left
        records = self._again(runner.final(entrants, None if left is None else left * (1 - AGAIN)), dict(entrants), runner, present)
        known = {record.candidate.key: record for record in self.records()}
        return [replace(record, accuracy=known[record.candidate.key].accuracy) for record in records]

    def _again(
        self, records: Sequence[Record], artifacts: Mapping[Candidate, Artifact], runner: Runner, present: Mapping[str, Schedule]
    ) -> list[Record]:
        """The final's records, with more rounds for all finalists of workloads whose winner is unclear, if time is left."""
        works = {w.key for w in unclear(records, self.spec.workloads, self.default, present, runner.compare)}
        candidates = [record.candidate for record in records if record.ok and record.candidate.workload.key in works]
        left = self.clock.final_left
        if not candidates or (left is not None and left < runner.shortest_final(len(candidates))):
            return list(records)
        self.tell("finalists", f"{len(candidates)} finalists are timed again")
        more: dict[Candidate, Record] = {}
        with suppress(KeyboardInterrupt):  # the final is complete without them
            more = {
                record.candidate: record for record in runner.final([(candidate, artifacts[candidate]) for candidate in candidates], left)
            }
        return [record.joined(more[record.candidate]) if record.candidate in more else record for record in records]

    def _plane(
        self, grid: Grid, decision: Decision, records: Sequence[Record], runner: Runner, compile_queue: CompileQueue
    ) -> Table | None:
        """Measure launches over the grid, for the dispatch table."""
        assert isinstance(self.spec, KernelSpec)
        stage = Plane(self.spec, self.found, grid, runner, compile_queue, lambda note: self.tell("grid", note))
        return stage.measure(decision, records, self.clock.left, untried=self.clock.budget.trials is None)

    def _decide(self, records: Sequence[Record], present: Mapping[str, Schedule], runner: Runner) -> Decision:
        decision = decide(records, self.spec.workloads, self.default, present, runner.compare)
        if decision is not None:
            return decision
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(r.kind for r in self.records()).items()))
        first = next((f": {r.candidate}: {r.kind}: {r.detail}" for r in self.records() if not r.ok), "")
        raise MeasureError(f"no schedule of {self.spec.name} was right at every workload ({kinds or 'nothing was measured'}){first}")

    def _register(
        self,
        decision: Decision,
        compile_queue: CompileQueue,
        judged: Sequence[Record],
        last: Sequence[Record],
        runner: Runner,
        seed: int,
        table: Table | None,
        *,
        interrupted: bool,
    ) -> TuningResult:
        facts = {"seed": seed, "trials": self.clock.used, "seconds": round(self.clock.elapsed, 1), "policy": dict(runner.policy)}
        facts |= {"points": len(self.records()), "failed": sum(1 for record in self.records() if not record.ok)}
        if table is not None:
            decision = table.decision
            facts |= {"grid": {"cells": len(table.dispatch.cells), "launches": table.finalists}}
        entry = make_entry(self.sources, decision, compile_queue, judged, self.default, facts, table)
        if entry.key != self.key:
            raise KvgenError(f"the entry's key is {entry.key}, and the run's {self.key}")
        path = self.store.put(entry)
        for one in self.store.find(self.spec):  # remove the untuned entry that was compiled for this machine elsewhere
            if one.entry is not None and one.entry.arch == self.target and not one.entry.timings:
                self.store.remove(one)
        measured_last = (*last, *(table.failures if table else ()))
        self.tell("done", decision.why)
        return TuningResult(
            self.spec, self.target, entry, path, decision.why, tuple(self.records()), measured_last, self.clock.used, self.known,
            self.clock.elapsed, interrupted, refusals=tuple(self.refusals), notes=self._notes(table),
            studies={f"{backend} {key}": trial_store.study.study_name for (backend, key), trial_store in self.trial_stores.items()},
        )  # fmt: skip

    def _notes(self, table: Table | None) -> tuple[str, ...]:
        """That there is no dispatch table although one was wanted; calls beside the workloads take the launch of the nearest."""
        if self.grid is None or table is not None:
            return ()
        reason = "nothing could be measured over it" if self.clock.left != 0 else "the time was used up before"
        return (f"no dispatch table: the grid was not measured, because {reason} (kvgen build goes on from here)",)

    # --- progress ----------------------------------------------------------------------------------------------------

    def tell(self, phase: Phase, note: str) -> None:
        """Report the state of the run to the caller's `progress`."""
        best: dict[str, Best] = {}
        defaults = {r.candidate.workload.key: r.cost for r in self.records() if r.ok and r.candidate.schedule.id == self.default.id}
        for record in self.records():
            key = record.candidate.workload.key
            if record.ok and (key not in best or record.cost < best[key].us):
                best[key] = Best(record.cost, str(record.candidate.schedule), defaults.get(key))
        self.watch(
            Progress(
                phase, note, self.clock.used, self.planned, self.known, self.failures.copy(), best, self.clock.elapsed, self.clock.left
            )
        )
