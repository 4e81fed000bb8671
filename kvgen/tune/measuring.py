"""The measuring loop: compiles and measures the candidates of a search, on all devices, until the budget or the space is used up."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from kvgen.errors import CompileError, CompilerCrash, ToolchainMissing, UnsupportedError
from kvgen.lower.schedule import Params
from kvgen.spec import AnyWorkload
from kvgen.toolchain import Artifact
from kvgen.tune.budget import Clock
from kvgen.tune.candidate import Candidate, Key, Record
from kvgen.tune.compile_queue import CompileQueue
from kvgen.tune.progress import Phase
from kvgen.tune.runner import Runner
from kvgen.tune.search import Search

if TYPE_CHECKING:
    from kvgen.tune.trial_store import TrialStore

AWAIT_S = 1.0
"""Seconds between two looks at what other hosts still measure, when nothing else is left."""


class Devices:
    """The idle devices, and what each has measured: inputs and references of a layout and workload stay on the device."""

    def __init__(self, count: int) -> None:
        self.idle = list(range(count))
        self._held: dict[int, set[tuple[Params, AnyWorkload]]] = defaultdict(set)

    def take(self, candidate: Candidate) -> int:
        """An idle device, if possible one that has inputs and references of this layout and workload already."""
        inputs = (candidate.layout, candidate.workload)
        device = next((one for one in self.idle if inputs in self._held[one]), self.idle[0])
        self.idle.remove(device)
        self._held[device].add(inputs)
        return device


class MeasuringLoop:
    """One run of the loop."""

    def __init__(
        self,
        search: Search,
        trial_stores: Mapping[tuple[str, str], TrialStore],
        runner: Runner,
        queue: CompileQueue,
        clock: Clock,
        tell: Callable[[Phase, str], None],
        finished: Callable[[Record], None],
        *,
        shared: bool,
    ) -> None:
        """`tell` is told what begins, `finished` every record. `shared`: other hosts work on the same studies."""
        self._search, self._trial_stores, self._runner, self._queue = search, trial_stores, runner, queue
        self._clock, self._tell, self._finished, self._shared = clock, tell, finished, shared
        self._window: deque[Candidate] = deque()
        """Candidates that are being compiled, or wait for a device."""
        self.uncompiled: list[tuple[Candidate, str]] = []
        """Candidates whose compiler failed for a reason of this machine. They are not judged, and a later build tries them."""
        self._forgone: list[Candidate] = []
        """Candidates that another host is measuring."""

    def run(self, first: Sequence[Candidate]) -> None:
        """Measure. The `first` candidates are measured whatever the budget is.

        The final's time is not touched: nothing is begun that would probably not be compiled by then, and nothing waited for that is
        not; but where measurements are exclusive, compilations that were begun are waited for.
        """
        must = {candidate.key for candidate in first}
        devices, running = Devices(self._runner.devices), dict[Future[Record], int]()
        with ThreadPoolExecutor(self._runner.devices, thread_name_prefix="measure") as pool:
            try:
                more = True
                while True:
                    if not self._window or not self._runner.exclusive:
                        more = self._refill(settle=self._runner.exclusive and not running)
                    while devices.idle and (candidate := self._next(must, busy=bool(running))) is not None:
                        artifact = self._compiled(candidate)
                        if artifact is not None:
                            self._clock.used += 1
                            self._tell("measuring", str(candidate.schedule))
                            device = devices.take(candidate)
                            running[pool.submit(self._runner.measure, candidate, artifact, device)] = device
                    if running:
                        for future in self._await(running, any_idle=bool(devices.idle)):
                            devices.idle.append(running.pop(future))
                            self._finish(future.result())
                    elif self._clock.search_over:
                        if not any(candidate.key in must for candidate in self._window):
                            break  # else `_next` waits for them
                    elif not (self._window or (more and (self._search.left or self._forgone))):
                        break
                    elif not self._window and not self._search.left:
                        time.sleep(AWAIT_S)
            except BaseException:
                self._runner.close()
                raise
        self._read_others()

    def _await(self, running: Mapping[Future[Record], int], *, any_idle: bool) -> list[Future[Record]]:
        """Wait for a measurement, or where a device is idle for a compiler; the measurements that are done."""
        awaited: list[Future[Any]] = list(running)
        if any_idle:
            awaited += self._queue.unfinished([one.schedule for one in self._window])
        wait(awaited, return_when=FIRST_COMPLETED)
        return [future for future in running if future.done()]

    def _next(self, must: set[Key], *, busy: bool) -> Candidate | None:
        """The next candidate to measure: the first, or with a bound of time or several devices the first that is compiled, waiting for it
        unless another device is `busy`. Once the search is over, only candidates in `must`.
        """
        due = [candidate for candidate in self._window if not self._clock.search_over or candidate.key in must]
        chosen: int | None = 0 if due else None
        if due and (self._clock.budget.seconds is not None or self._runner.devices > 1):
            chosen = self._queue.first_ready([one.schedule for one in due], 0.0 if busy else self._clock.search_left or None)
        if chosen is None:
            return None
        self._window.remove(due[chosen])
        return due[chosen]

    def _refill(self, *, settle: bool) -> bool:
        """Start more candidates, as many as compilers and devices can take; False if there is no time for any. If there is no time to
        compile, only candidates that are already compiled. `settle`: wait until all are compiled.
        """
        search, queue = self._search, self._queue
        if self._clock.search_over and not search.first:
            return False
        room, left = 2 * max(queue.workers, self._runner.devices) - len(self._window), self._clock.search_left
        if (trials := self._clock.trials_left) is not None:  # nothing is compiled that would not be measured
            room = min(room, max(len(search.first), trials - len(self._window)))
        fresh = room if left is None else min(room, max(len(search.first), queue.capacity(left)))
        claimed = self._read_others()
        candidates = self._claim(search.next(fresh) if fresh > 0 else search.transfers(room), claimed)
        for candidate in candidates:
            queue.start(candidate.schedule)
        self._window.extend(candidates)
        if not self._runner.exclusive and fresh > 0:
            # The next round may wait for records: compilers without work begin with what is likely in it.
            for schedule in search.likely(min(queue.spare, fresh - len(candidates))):
                queue.start(schedule)
        if settle and candidates:
            self._tell("compiling", f"{len(candidates)} schedules")
            queue.wait_idle()
        return fresh > 0 or bool(candidates) or bool(self._window)

    def _claim(self, candidates: Sequence[Candidate], claimed: set[Key]) -> list[Candidate]:
        """Claim candidates for this host, except those that another has `claimed`."""
        mine = []
        for candidate in candidates:
            if candidate.key in claimed or not self._trial_store(candidate).claim(candidate.schedule):
                self._search.forgo(candidate)
                self._forgone.append(candidate)
            else:
                mine.append(candidate)
        return mine

    def _read_others(self) -> set[Key]:
        """Use what other hosts have measured, and try what dead ones had claimed; the keys of candidates that living ones have claimed."""
        claimed: set[Key] = set()
        for trial_store in self._trial_stores.values() if self._shared else ():
            claimed |= {(identity, trial_store.workload.key) for identity in trial_store.claimed_elsewhere()}
            for record in trial_store.read():
                self._search.take(record)
        waiting, self._forgone = self._forgone, []
        for candidate in waiting:
            if candidate.key in claimed:
                self._forgone.append(candidate)
            elif candidate.schedule.id not in self._trial_store(candidate).records:
                self._search.regain(candidate)
        return claimed

    def _compiled(self, candidate: Candidate) -> Artifact | None:
        """The candidate's artifact; None if it does not compile, which is recorded."""
        try:
            return self._queue.artifact(candidate.schedule)
        except (ToolchainMissing, CompilerCrash) as error:  # another time or machine may compile it: not recorded
            self.uncompiled.append((candidate, str(error)))
            self._trial_store(candidate).release(candidate.schedule)
            self._search.take(Record(candidate, "unsupported", detail=str(error)))
            return None
        except (CompileError, UnsupportedError) as error:
            self._clock.used += 1
            kind = "unsupported" if isinstance(error, UnsupportedError) else "compile_error"
            self._finish(Record(candidate, kind, detail=str(error)))
            return None

    def _finish(self, record: Record) -> None:
        self._trial_store(record.candidate).finish(record)
        self._search.take(record)
        self._finished(record)

    def _trial_store(self, candidate: Candidate) -> TrialStore:
        return self._trial_stores[candidate.backend, candidate.workload.key]
