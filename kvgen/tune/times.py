"""The measured times of launches over workloads, and the runs that fill them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from kvgen.lower.schedule import Schedule
from kvgen.spec import AnyWorkload, Workload
from kvgen.toolchain import Artifact
from kvgen.tune.candidate import Candidate, Record
from kvgen.tune.runner import Runner

BARRING = ("crash", "timeout", "wrong")
"""Kinds of outcomes after which a launch is trusted nowhere."""
LATE = "the build's time was used up"


class Times:
    """Records by workload and launch. A launch that crashed, hung or was wrong anywhere is *barred*: its times do not count."""

    def __init__(self) -> None:
        self._records: dict[str, dict[Schedule, Record]] = {}
        self.skipped: dict[str, str] = {}
        """Workloads without any time, by name, with the reason."""
        self.barred: set[Schedule] = set()
        self.failures: list[Record] = []

    def take(self, workload: Workload, records: Iterable[Record]) -> None:
        """Add the records of a workload."""
        here = self._records.setdefault(workload.key, {})
        for record in records:
            here[record.candidate.schedule] = record
            if not record.ok:
                self.failures.append(record)
                if record.kind in BARRING:
                    self.barred.add(record.candidate.schedule)
        if not any(record.ok for record in here.values()):
            self.skipped[workload.key] = next((record.detail for record in here.values()), "no launch can serve it")
        else:
            self.skipped.pop(workload.key, None)

    def pass_over(self, workloads: Iterable[Workload]) -> None:
        """Workloads for which there is no time left."""
        self.skipped |= {workload.key: LATE for workload in workloads if workload.key not in self._records}

    def record(self, workload: AnyWorkload, schedule: Schedule) -> Record | None:
        """The measurement of a launch at a workload, good or bad; None without one."""
        return self._records.get(workload.key, {}).get(schedule)

    def us(self, workload: Workload, schedule: Schedule) -> float:
        """µs of a launch at a workload; infinite where it is barred, failed or was not measured."""
        record = self.record(workload, schedule)
        return math.inf if record is None or schedule in self.barred else record.cost

    def best(self, workload: Workload, schedules: Iterable[Schedule]) -> float:
        """The least time at a workload; infinite without any."""
        return min((self.us(workload, schedule) for schedule in schedules), default=math.inf)

    def read_us(self, workload: Workload) -> float | None:
        """The read roofline at a workload."""
        return next((record.read_us for record in self._records.get(workload.key, {}).values() if record.read_us is not None), None)


Entrants = Callable[[Workload], Sequence[tuple[Schedule, Artifact]]]
"""The launches that can serve a workload, compiled."""


def fill(
    times: Times,
    cells: Sequence[Workload],
    entrants: Entrants,
    runner: Runner,
    rounds: Callable[[Workload], int],
    until: float | None,
    told: Callable[[str], None],
) -> None:
    """Measure cells in their order, one on each device at a time, until `until` (of `time.monotonic`); the rest is skipped.

    A cell is not begun if the slowest one so far would not be done by then.
    """
    slowest = 0.0
    idle, running = list(range(runner.devices)), dict[Future[list[Record]], tuple[int, Workload, float]]()
    waiting: Iterator[tuple[int, Workload]] = iter(enumerate(cells))
    with ThreadPoolExecutor(runner.devices, thread_name_prefix="measure") as pool:
        try:
            more = True
            while more or running:
                while more and idle:
                    number, cell = next(waiting, (len(cells), None))
                    if cell is None or (until is not None and time.monotonic() + slowest > until):
                        times.pass_over(cells[number:])
                        more = False
                        break
                    told(f"{cell.key} ({number + 1} of {len(cells)})")
                    here = [(Candidate(schedule, cell), artifact) for schedule, artifact in entrants(cell)]
                    if not here:
                        times.take(cell, [])
                        continue
                    device = idle.pop(0)
                    future = pool.submit(runner.measure_cell, here, rounds(cell), device)
                    running[future] = device, cell, time.monotonic()
                done, _ = wait(running, return_when=FIRST_COMPLETED) if running else (set(), set())
                for future in done:
                    device, cell, began = running.pop(future)
                    idle.append(device)
                    slowest = max(slowest, time.monotonic() - began)
                    times.take(cell, future.result())
        except BaseException:
            runner.close()
            raise
