"""The last stage of a build: measures launches over the grid of the (batch, tokens) plane, and makes the dispatch table.

Three steps: launches over the winning layout, those of the search and what can be compiled beside them, at a few workloads (*screening*);
the best of them over the grid; then the choice of a portfolio, whose members are verified at the largest workloads that they serve.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from typing import Any

from kvgen.arch import Target
from kvgen.errors import CompileError, CompilerCrash, ToolchainMissing, UnsupportedError
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.space import SearchSpace
from kvgen.plaindata import Facts
from kvgen.registry.dispatch import Cell, DispatchTable, smallest
from kvgen.spec import KernelSpec, Workload
from kvgen.spec.grid import Grid, q_len_of
from kvgen.toolchain import Artifact
from kvgen.tune.candidate import Candidate, Key, Record
from kvgen.tune.compile_queue import CompileQueue
from kvgen.tune.contenders import Contender
from kvgen.tune.decide import Decision
from kvgen.tune.failures import failures
from kvgen.tune.portfolio import Portfolio, choose, worst_by_size
from kvgen.tune.runner import Runner, verified
from kvgen.tune.times import BARRING, Times, fill

POOL = 128
"""Most launches that are screened."""
FINALISTS = 12
"""Most launches that are measured over the grid, beside the plain schedule and the winners of workloads."""
COMPILING = 0.2
"""Of the stage's time, for compiling launches that the search did not try."""
SCREENING = 0.5
"""Of the stage's time, the end of screening."""
VERIFYING = 0.1
"""Of the stage's time, for verification."""
ROUNDS = 2
TUNED_ROUNDS = 4
"""At the workloads of the spec, whose winners only give way to launches within GIVEN of them."""
GIVEN = 1.02
"""The largest regret at a workload of the spec. Winners that differ by less would take places which other calls need."""
DETAIL = 1000
"""Most characters of what an entry says of launches that failed."""
VERIFIED_AT = 3
"""Workloads at which a member is verified: of most sequences, of the longest, of most tokens."""


@dataclass(frozen=True)
class Table:
    """The result of the stage."""

    decision: Decision
    """The decision, where a workload's winner has given way to a launch of the portfolio within GIVEN of it."""
    dispatch: DispatchTable
    """Its `launches` are empty: `Entry.of` fills them from `more`."""
    more: tuple[tuple[Workload, Schedule], ...]
    """The launches beyond those of the workloads, in the order of their indices, each with the smallest workload that it serves."""
    facts: Facts
    """Of the measurement, for the entry's provenance: numbers of cells and launches, and what failed."""
    failures: tuple[Record, ...]


class Plane:
    """One run of the stage."""

    def __init__(
        self,
        spec: KernelSpec,
        target: Target,
        found: Sequence[Contender],
        grid: Grid,
        runner: Runner,
        queue: CompileQueue,
        tell: Callable[[str], None],
    ) -> None:
        self._spec, self._target, self._grid = spec, target, grid
        self._spaces, self._backends = {c.backend.name: c.space for c in found}, {c.backend.name: c.backend for c in found}
        self._plain = [c.defaults.plain for c in found]
        self._guesses = [schedule for c in found for schedule in dict.fromkeys(c.defaults.grid.values())]
        """The back ends' defaults at the cells of the grid, each once."""
        self._runner, self._queue, self._tell = runner, queue, tell
        self._q_len = q_len_of(spec)
        self._artifacts: dict[Schedule, Artifact | None] = {}
        self._times = Times()
        self._judged: set[Key] = set()
        """The candidates that were verified, or whose inputs do not fit."""
        self._most_positions = math.inf
        """Sequences times longest length at which a reference did not fit into memory: it takes several times the memory of a launch."""

    def measure(self, decision: Decision, records: Sequence[Record], seconds: float | None, *, untried: bool = True) -> Table | None:
        """Measure within `seconds` (None: the whole grid) and choose; None where nothing could be measured. `records` are those of the
        search and of the final. `untried`: launches that the search did not measure take part, too.
        """
        began = time.monotonic()

        def until(share: float) -> float | None:
            return None if seconds is None else began + share * seconds

        barred = (record.candidate.schedule for record in records if not record.ok and record.kind in BARRING)
        self._times.barred.update(barred)
        winners = list(dict.fromkeys(record.candidate.schedule for record in decision.launches.values()))
        default = self._default(decision, winners)
        pool = self._pool(decision, records, [default, *winners])
        if untried:
            pool += self._untried(decision, pool, seconds)
        if self._runner.exclusive:
            self._queue.wait_idle()
        self._fill(self._grid.anchors(self._q_len), pool, until(SCREENING), rounds=1)
        finalists = self._finalists(pool, self._defaults(decision), [default, *winners])
        own = {work.key for work in self._spec.workloads}
        cells = [*self._spec.workloads, *(cell for cell in self._grid.cells(self._q_len) if cell.key not in own)]
        self._fill(cells, finalists, until(1 - VERIFYING))
        while True:
            if default in self._times.barred:  # calls beyond the grid take it
                default = self._default(decision, winners)
                finalists = list(dict.fromkeys([*finalists, default]))
            measured = [cell for cell in cells if self._serving(cell, finalists, decision)]
            portfolio, worst_regrets = self._choose(measured, finalists, default, decision)
            if self._verified(portfolio, measured, finalists):
                return self._table(decision, portfolio, worst_regrets, measured, finalists, default)

    @property
    def wrong(self) -> list[Record]:
        """What was wrong at a workload of the grid."""
        return [record for record in self._times.failures if record.kind == "wrong"]

    # --- launches ----------------------------------------------------------------------------------------------------

    def _default(self, decision: Decision, winners: Sequence[Schedule]) -> Schedule:
        """The launch for calls beyond the grid: the first back end's plain one over the winning layout, else the next one's; where none
        can be built over that layout, the winner of the first workload.
        """
        for plain in self._plain:
            schedule = Schedule(plain.backend, decision.layout, plain.launch)
            if schedule in self._times.barred or self._spaces[plain.backend].check(schedule):
                continue
            if self._artifact(schedule) is not None:
                return schedule
        return next((winner for winner in winners if winner not in self._times.barred), winners[0])

    def _pool(self, decision: Decision, records: Iterable[Record], first: Iterable[Schedule]) -> list[Schedule]:
        """Launches over the winning layout that were right, those first that came nearest to the best time of a workload."""
        least: dict[str, float] = {}
        good = [record for record in records if record.ok and record.candidate.layout == decision.layout]
        for record in good:
            key = record.candidate.workload.key
            least[key] = min(record.cost, least.get(key, record.cost))
        ratio: dict[Schedule, float] = {}
        for record in good:
            schedule, mine = record.candidate.schedule, record.cost / least[record.candidate.workload.key]
            ratio[schedule] = min(mine, ratio.get(schedule, mine))
        ranked = sorted(ratio, key=lambda schedule: (ratio[schedule], schedule.id))
        pool = list(dict.fromkeys([*first, *ranked]))
        usable = (schedule for schedule in pool if schedule not in self._times.barred and self._artifact(schedule) is not None)
        return list(islice(usable, POOL))

    def _untried(self, decision: Decision, pool: Sequence[Schedule], seconds: float | None) -> list[Schedule]:
        """Further launches: the defaults at the cells, and what the search would try at a screened workload. As many as can be compiled in
        COMPILING of the time.
        """
        found = [*self._defaults(decision), *in_turns(self._spaces, decision.layout, self._grid.anchors(self._q_len))]
        fresh = [schedule for schedule in dict.fromkeys(found) if schedule not in pool and schedule not in self._times.barred]
        fresh = fresh[: max(0, POOL - len(pool))]
        limit = None if seconds is None else COMPILING * seconds
        if limit is not None:
            fresh = fresh[: self._queue.capacity(limit)]
        self._tell(f"compiling {len(fresh)} launches that the search did not try")
        return [schedule for schedule in self._queue.done(fresh, limit) if self._artifact(schedule) is not None]

    def _defaults(self, decision: Decision) -> list[Schedule]:
        """The defaults at the cells, over the winning layout: near the best for kinds of traffic that screening does not try."""
        over = [Schedule(guess.backend, decision.layout, guess.launch) for guess in self._guesses]
        return [schedule for schedule in dict.fromkeys(over) if not self._spaces[schedule.backend].check(schedule)]

    def _finalists(self, pool: Sequence[Schedule], guesses: Iterable[Schedule], first: Iterable[Schedule]) -> list[Schedule]:
        """The launches for the grid: the best of every screened workload, then the `guesses`, then the second best, and so on."""
        anchors = [cell for cell in self._grid.anchors(self._q_len) if self._serving(cell, pool)]
        ranks = [sorted(pool, key=lambda schedule: self._times.us(cell, schedule)) for cell in anchors] or [list(pool)]
        best, *others = list(zip(*ranks, strict=True)) or [()]
        better = [*best, *(guess for guess in guesses if guess in pool), *chain.from_iterable(others)]
        chosen = [schedule for schedule in dict.fromkeys(better) if schedule not in self._times.barred]
        return list(dict.fromkeys([*first, *chosen[:FINALISTS]]))

    def _artifact(self, schedule: Schedule) -> Artifact | None:
        """The compiled launch; None if it does not compile."""
        if schedule not in self._artifacts:
            try:
                self._artifacts[schedule] = self._queue.artifact(schedule)
            except (CompileError, CompilerCrash) as error:
                self._artifacts[schedule] = None
                self._times.failures.append(Record(Candidate(schedule, self._spec.workloads[0]), "compile_error", detail=str(error)))
            except (ToolchainMissing, UnsupportedError):
                self._artifacts[schedule] = None
        return self._artifacts[schedule]

    # --- measuring ---------------------------------------------------------------------------------------------------

    def _fill(self, cells: Sequence[Workload], schedules: Sequence[Schedule], until: float | None, rounds: int | None = None) -> None:
        own = {work.key for work in self._spec.workloads}

        def how_often(cell: Workload) -> int:
            if rounds is not None:
                return rounds
            return TUNED_ROUNDS if cell.key in own else 1 if cell.load == "sustained" else ROUNDS

        def entrants(cell: Workload) -> list[tuple[Schedule, Artifact]]:
            return [(s, artifact) for s in schedules if s not in self._times.barred and (artifact := self._fitting(s, cell)) is not None]

        fill(self._times, cells, entrants, self._runner, how_often, until, self._tell)

    def _fitting(self, schedule: Schedule, cell: Workload) -> Artifact | None:
        """The compiled launch, if it can serve a workload."""
        return None if self._spaces[schedule.backend].check(schedule, cell) else self._artifact(schedule)

    def _serving(self, cell: Workload, schedules: Iterable[Schedule], decision: Decision | None = None) -> bool:
        """Whether a launch has a time at a cell, or the cell is a workload, which has a winner."""
        return self._times.best(cell, schedules) < float("inf") or (decision is not None and cell.key in decision.launches)

    # --- choice ------------------------------------------------------------------------------------------------------

    def _choose(
        self, cells: Sequence[Workload], finalists: Sequence[Schedule], default: Schedule, decision: Decision
    ) -> tuple[Portfolio, dict[int, float]]:
        """The portfolio, and the least worst regret by number of launches.

        At the spec's own workloads regret counts from the winner, and is GIVEN at most.
        """
        rows: list[list[float]] = [[] for _ in finalists]
        limits: dict[int, float] = {}
        for number, cell in enumerate(cells):
            winner = decision.launches.get(cell.key)
            times = [self._times.us(cell, schedule) for schedule in finalists]
            base = min(times)
            if winner is not None:
                place, limits[number] = finalists.index(winner.candidate.schedule), GIVEN
                base = times[place] if times[place] < float("inf") else winner.cost
                times[place] = base  # it was verified and measured there, whatever else it failed at
            for row, us in zip(rows, times, strict=True):
                row.append(us / base)
        keep = [finalists.index(default)]
        portfolio = choose(rows, keep, limits)
        serves, calls_beyond = list(portfolio.serves), finalists.index(default)
        for number, cell in enumerate(cells):
            winner = decision.launches.get(cell.key)
            if winner is None:
                continue
            place = finalists.index(winner.candidate.schedule)
            # A winner gives way to save a launch, and to a plain schedule that is faster, not to a third time that was measured once more.
            if place in portfolio.launches and rows[place][number] <= rows[calls_beyond][number]:
                serves[number] = place
        return replace(portfolio, serves=tuple(serves)), worst_by_size(rows, keep, limits)

    def _verified(self, portfolio: Portfolio, cells: Sequence[Workload], finalists: Sequence[Schedule]) -> bool:
        """Whether every member is right at the largest workloads that it serves, and at those of the spec. One that is not, or that can be
        verified nowhere, is barred.
        """
        for index in portfolio.launches:
            schedule = finalists[index]
            served = [cell for cell, launch in zip(cells, portfolio.serves, strict=True) if launch == index]
            artifact = self._artifact(schedule)
            while artifact is not None and (cell := self._next_to_verify(schedule, served)) is not None:
                candidate = Candidate(schedule, cell)
                self._tell(f"verifying {candidate}")
                record = verified(self._runner, candidate, artifact)
                if record.kind == "oom":
                    self._tell(f"the reference does not fit into memory at {cell.key}")
                    self._most_positions = cell.batch * cell.kv_len
                    continue
                self._judged.add(candidate.key)
                if not record.right and record.kind != "unsupported":
                    self._times.failures.append(record)
                    self._times.barred.add(schedule)
                    return False
            if artifact is None or all(module != artifact.sha256 for module, _ in self._runner.passed):
                self._times.barred.add(schedule)
                return False
        return True

    def _next_to_verify(self, schedule: Schedule, served: Sequence[Workload]) -> Workload | None:
        """The next workload at which a launch has to be verified: of those that it serves and whose reference fits into memory or, where
        none does, of the screened ones.
        """
        own = {work.key for work in self._spec.workloads}
        fitting = self._fitting_reference(served) or self._fitting_reference(self._grid.anchors(self._q_len))[:1]
        cells = [*largest(fitting), *(cell for cell in fitting if cell.key in own)]
        return next((cell for cell in cells if Candidate(schedule, cell).key not in self._judged), None)

    def _fitting_reference(self, cells: Iterable[Workload]) -> list[Workload]:
        return [cell for cell in cells if cell.batch * cell.kv_len < self._most_positions]

    def _table(
        self,
        decision: Decision,
        portfolio: Portfolio,
        worst_regrets: Mapping[int, float],
        cells: Sequence[Workload],
        finalists: Sequence[Schedule],
        default: Schedule,
    ) -> Table | None:
        serves = {cell.key: finalists[index] for cell, index in zip(cells, portfolio.serves, strict=True)}
        launches = {key: self._winner(record, serves[key]) for key, record in decision.launches.items()}
        order = [launches[work.key].candidate.schedule for work in self._spec.workloads]
        members = [finalists[index] for index in portfolio.launches]
        further = [schedule for schedule in members if schedule not in order]
        index = {schedule: number for number, schedule in reversed(list(enumerate([*order, *further])))}
        timed = [cell for cell in cells if self._times.us(cell, serves[cell.key]) < float("inf")]
        if all(cell.key in launches for cell in timed):  # of no use: others would take the plain schedule, not the nearest launch
            return None
        rows = tuple(self._cell(cell, serves[cell.key], members, finalists, index) for cell in timed)
        numbers = tuple(index[schedule] for schedule in members)
        waves = tuple(self._backends[schedule.backend].waves(self._spec, schedule, self._target) for schedule in members)
        table = DispatchTable((), index[default], numbers, rows, dict(self._times.skipped), round(portfolio.worst, 4), waves)
        homes = tuple((self._home(schedule, cells, serves), schedule) for schedule in further)
        rivals = {
            key: rival
            for key, rival in decision.rivals.items()
            if key in launches and rival.candidate.backend != launches[key].candidate.backend
        }
        worst = {str(size): round(regret, 4) for size, regret in worst_regrets.items()}
        facts = {"cells": len(rows), "launches": len(finalists), "worst_by_launches": worst, "failed": self._failed()}
        return Table(replace(decision, launches=launches, rivals=rivals), table, homes, facts, tuple(self._times.failures))

    def _failed(self) -> list[dict[str, Any]]:
        """What failed, as plain data, long details cut. Workloads that no launch can serve are in the table, as skipped."""
        found = failures(record for record in self._times.failures if record.kind != "unsupported")
        return [replace(failure, detail=failure.detail[:DETAIL]).to_json() for failure in found]

    def _winner(self, record: Record, serving: Schedule) -> Record:
        """The record of the launch that serves a workload: the winner's, or what the grid has of the one that it gave way to."""
        if record.candidate.schedule == serving:
            return record
        measured = self._times.record(record.candidate.workload, serving)
        assert measured is not None
        return replace(measured, accuracy=self._runner.passed.get((measured.module, measured.candidate.workload.key), {}))

    def _cell(
        self, cell: Workload, serving: Schedule, members: Sequence[Schedule], finalists: Sequence[Schedule], index: Mapping[Schedule, int]
    ) -> Cell:
        times = [self._times.us(cell, schedule) for schedule in members]
        record = self._times.record(cell, serving)
        power = (record.watts, record.clock_mhz) if record is not None else (None, None)
        us = tuple(round(time, 3) if time < float("inf") else None for time in times)
        best, read = self._times.best(cell, finalists), self._times.read_us(cell)
        return Cell(cell.key, index[serving], us, round(best, 3), None if read is None else round(read, 3), *power)

    @staticmethod
    def _home(schedule: Schedule, cells: Sequence[Workload], serves: Mapping[str, Schedule]) -> Workload:
        """The smallest workload that a launch serves; of a default that serves none, the smallest of all."""
        home = smallest([cell for cell in cells if serves[cell.key] == schedule] or cells)
        assert home is not None, "something was measured"
        return home


def in_turns(spaces: Mapping[str, SearchSpace], layout: Params, cells: Sequence[Workload]) -> list[Schedule]:
    """What a search would try at these workloads, each launch once: the first launch of every workload and back end, then every second one.

    Where time or POOL ends the list, every kind of traffic has had its share of it. A launch that only short heads want is near the front.
    """
    lists = [
        [Schedule(backend, layout, launch) for launch in space.launches(layout, cell)]
        for cell in cells
        for backend, space in spaces.items()
    ]
    return list(dict.fromkeys(schedule for schedule in chain.from_iterable(zip_longest(*lists)) if schedule is not None))


def largest(cells: Sequence[Workload]) -> list[Workload]:
    """The cells of most sequences, of the longest, and of most tokens."""
    orders: list[Callable[[Workload], tuple[float, ...]]] = [
        lambda cell: (cell.batch, cell.kv_len),
        lambda cell: (cell.kv_len, cell.batch),
        lambda cell: (cell.batch * cell.kv_len, cell.kv_len - cell.shortest),
    ]
    return list(dict.fromkeys(max(cells, key=order) for order in orders[:VERIFIED_AT])) if cells else []
