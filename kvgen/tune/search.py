"""Chooses the candidate to measure next: successive halving over layouts, and a search over the launches of the remaining layouts.

The first round has the layouts nearest to the default's, each with the launch nearest to its back end's default. Each later round gives
more launches to every active layout, back end and workload, and sets the worse half of the layouts aside, by the weighted geometric mean
of their best times of any back end. When another layout takes the lead, its nearest neighbours become active. Within a layout, a back end
that is far behind another at a workload is set aside there. What was set aside is tried when nothing else is left. If the budget covers the
whole space, everything is active from the start, and nothing is set aside.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from kvgen.lower.schedule import Params, Schedule, Value
from kvgen.spec import AnyWorkload
from kvgen.tune.candidate import Candidate, Key, Record

STARTERS = 3
"""Largest number of layouts in the first round: the defaults' and those that differ least from them."""
JOINERS = 2
"""Layouts that become active when the lead has changed."""

NEARLY = 1.1
"""A launch within this factor of the best at one workload is measured at the others too. A back end that is not within this factor of
the best over the same layout, after PATIENCE launches, is set aside."""
PATIENCE = 3
"""Launches that a back end may try at a workload before NEARLY applies."""


@dataclass
class SearchQueue:
    """The launches of one back end over one layout at one workload: those still to try, in the seed's order, and the records so far."""

    layout: Params
    workload: AnyWorkload
    todo: dict[str, Schedule]
    start: Schedule
    """The back end's default at the workload."""
    given: int = 0
    best: Record | None = None
    found: list[Record] = field(default_factory=list)
    """Records of successful measurements, in the order in which they came."""

    @property
    def backend(self) -> str:
        """Name of the back end."""
        return self.start.backend

    def holds(self, candidate: Candidate) -> bool:
        """Whether a candidate belongs to this queue, measured or not."""
        return (self.backend, self.layout, self.workload.key) == (candidate.backend, candidate.layout, candidate.workload.key)

    def take(self, schedule: Schedule) -> Candidate | None:
        """Remove a schedule that is still to be tried and return its candidate; None for any other schedule."""
        found = self.todo.pop(schedule.id, None)
        return Candidate(found, self.workload) if found else None

    def nearest(self, to: Schedule, order: Mapping[str, Sequence[Value]]) -> Schedule | None:
        """The untried schedule that differs least from another: in the fewest parameters, then by the fewest steps."""
        return min(self.todo.values(), key=lambda s: _distance(s.launch, to.launch, order), default=None)

    def likely(self, order: Mapping[str, Sequence[Value]]) -> list[Schedule]:
        """The untried schedules, those first that differ least from the best so far, or from the default."""
        around = self.best.candidate.schedule if self.best else self.start
        return sorted(self.todo.values(), key=lambda s: _distance(s.launch, around.launch, order))


Suggest = Callable[[SearchQueue], Schedule | None]


def _starters(layouts: Sequence[Params], away: Mapping[Params, tuple[int, int]]) -> list[Params]:
    """The nearest layout, and all at the second smallest distance."""
    second = min((away[layout] for layout in layouts[1:]), default=(0, 0))
    return [layout for layout in layouts if away[layout] <= second][:STARTERS]


def _distance(one: Params, other: Params, order: Mapping[str, Sequence[Value]]) -> tuple[int, int]:
    changed = steps = 0
    for name, value in one.items():
        if name not in other or other[name] != value:
            changed += 1
            values = order.get(name, ())
            if name in other and value in values and other[name] in values:
                steps += abs(values.index(value) - values.index(other[name]))
    return changed, steps


@dataclass
class Search:
    """Returns candidates and takes their records. `exhaustive`: the budget covers all candidates, so nothing is set aside or guessed."""

    queues: list[SearchQueue]
    order: Mapping[str, Sequence[Value]]
    """Values of each parameter in the order of the space: neighbours are near."""
    suggest: Suggest
    exhaustive: bool
    quota: int = 1
    pending: set[Key] = field(default_factory=set)
    first: deque[Candidate] = field(default_factory=deque)
    alive: list[Params] = field(init=False)
    """Active layouts."""
    waiting: list[Params] = field(default_factory=list)
    """Layouts that were set aside, or are not active yet."""
    _leader: Params | None = field(init=False, default=None)
    _all_backends: bool = field(init=False, default=False)
    """Whether back ends that are far behind are active too."""

    def __post_init__(self) -> None:
        """Order the layouts by their distance from the nearest default."""
        away: dict[Params, tuple[int, int]] = {}
        for queue in self.queues:
            distance = _distance(queue.layout, queue.start.layout, self.order)
            away[queue.layout] = min(distance, away.get(queue.layout, distance))
        self.alive = sorted(away, key=lambda layout: away[layout])
        self.queues.sort(key=lambda queue: self.alive.index(queue.layout))
        self._all_backends = self.exhaustive
        if not self.exhaustive:
            starters = _starters(self.alive, away)
            self.waiting = [layout for layout in self.alive if layout not in starters]
            self.alive = starters
        self._leader = self._best_layout()

    def lead(self, candidates: Iterable[Candidate]) -> None:
        """Return these candidates before any other."""
        for candidate in candidates:
            for queue in self.queues:
                if queue.holds(candidate):
                    queue.take(candidate.schedule)
            self.first.append(candidate)

    # --- giving ----------------------------------------------------------------------------------------------------

    def next(self, count: int) -> list[Candidate]:
        """Up to `count` candidates; fewer, or none, if the next ones depend on records of pending candidates, or if none are left."""
        candidates: list[Candidate] = []
        while len(candidates) < count:
            candidate = self._pick()
            if candidate is None:
                break
            self.pending.add(candidate.key)
            candidates.append(candidate)
        return candidates

    def transfers(self, count: int) -> list[Candidate]:
        """Up to `count` candidates whose schedule did well at another workload and is therefore compiled."""
        candidates: list[Candidate] = []
        for queue in self._racing():
            while len(candidates) < count and (guess := self._transfer(queue)) is not None:
                candidates.append(Candidate(queue.todo.pop(guess.id), queue.workload))
        self.pending.update(candidate.key for candidate in candidates)
        return candidates

    def likely(self, count: int) -> list[Schedule]:
        """Up to `count` schedules that the next round may ask for, of every racing queue in turn."""
        rows = zip_longest(*(queue.likely(self.order)[:count] for queue in self._racing()))
        return list({schedule.id: schedule for row in rows for schedule in row if schedule}.values())[:count]

    @property
    def left(self) -> int:
        """Number of candidates that were not returned yet."""
        return len(self.first) + sum(len(queue.todo) for queue in self.queues)

    def _pick(self) -> Candidate | None:
        if self.first:
            return self.first.popleft()
        while True:
            open_queues = [queue for queue in self._racing() if queue.todo and queue.given < self.quota]
            if open_queues:
                queue = min(open_queues, key=lambda found: found.given)
                queue.given += 1
                return self._propose(queue)
            if self.pending or not self._next_round():
                return None

    def _racing(self) -> list[SearchQueue]:
        return [queue for queue in self.queues if queue.layout in self.alive and (self._all_backends or not self._far_behind(queue))]

    def _far_behind(self, queue: SearchQueue) -> bool:
        """Whether another back end is much faster over the same layout at the same workload."""
        if queue.best is None or queue.given < PATIENCE:
            return False
        rivals = (other for other in self.queues if other.layout == queue.layout and other.workload.key == queue.workload.key)
        return any(other.best is not None and queue.best.cost > NEARLY * other.best.cost for other in rivals)

    def _propose(self, queue: SearchQueue) -> Candidate:
        """A promising candidate if one can be guessed, otherwise the next in the seed's order."""
        guess: Schedule | None = None
        if queue.given == 1:
            guess = queue.nearest(queue.start, self.order)
        elif not self.exhaustive:
            guess = self._transfer(queue) or (self._neighbour(queue) if queue.given % 2 else self.suggest(queue))
        candidate = queue.take(guess) if guess else None
        return candidate or Candidate(queue.todo.pop(next(iter(queue.todo))), queue.workload)

    def _transfer(self, queue: SearchQueue) -> Schedule | None:
        """The launch that was best, or nearly, at another workload over the same layout; it is already compiled."""
        near: list[tuple[float, Schedule]] = []
        for other in self.queues:
            if other.layout == queue.layout and other is not queue and other.best is not None:
                ratios = ((record.cost / other.best.cost, record.candidate.schedule) for record in other.found)
                near += [(ratio, schedule) for ratio, schedule in ratios if ratio <= NEARLY and schedule.id in queue.todo]
        return min(near, key=lambda item: item[0])[1] if near else None

    def _neighbour(self, queue: SearchQueue) -> Schedule | None:
        return queue.nearest(queue.best.candidate.schedule, self.order) if queue.best else None

    # --- taking ----------------------------------------------------------------------------------------------------

    def take(self, record: Record) -> None:
        """Use a record: of a candidate that was returned, or of an earlier run."""
        self.pending.discard(record.candidate.key)
        for queue in self.queues:
            if queue.holds(record.candidate):
                queue.todo.pop(record.candidate.schedule.id, None)
                if record.ok:
                    queue.found.append(record)
                if record.ok and (queue.best is None or record.cost < queue.best.cost):
                    queue.best = record

    def forgo(self, candidate: Candidate) -> None:
        """Leave a candidate to another host, whose record may arrive later."""
        self.pending.discard(candidate.key)

    def regain(self, candidate: Candidate) -> None:
        """Try a candidate again that was left to another host: the host died before it measured it."""
        for queue in self.queues:
            if queue.holds(candidate):
                queue.todo[candidate.schedule.id] = candidate.schedule

    def score(self, layout: Params) -> float:
        """Weighted geometric mean of the layout's best times in µs, of any back end; infinite while a workload has none."""
        best: dict[AnyWorkload, float] = {}
        for queue in self.queues:
            if queue.layout == layout:
                best[queue.workload] = min(best.get(queue.workload, math.inf), queue.best.cost if queue.best else math.inf)
        return geomean((cost, workload.weight) for workload, cost in best.items())

    def _next_round(self) -> bool:
        """Begin another round; False when no candidates are left."""
        if not self.left:
            return False
        if not self.exhaustive:
            ranked = sorted(self.alive, key=self.score)
            keep = ranked[: -(-len(ranked) // 2)]
            joining = self._joiners()
            self.alive = keep + joining
            self.waiting = [layout for layout in ranked if layout not in keep] + [found for found in self.waiting if found not in joining]
        while not any(queue.todo for queue in self._racing()) and self.waiting:
            self.alive.append(self.waiting.pop(0))
        self._all_backends = self._all_backends or not any(queue.todo for queue in self._racing())
        self.quota = 2 * self.quota + 1
        return True

    def _best_layout(self) -> Params | None:
        """The best active layout; the first one as long as none is measured."""
        return min(self.alive, key=self.score, default=None)

    def _joiners(self) -> list[Params]:
        """Layouts near a new leader that were never tried; empty if the lead has not changed."""
        leader = self._best_layout()
        if leader is None or leader == self._leader:
            return []
        self._leader = leader
        tried = {queue.layout for queue in self.queues if queue.best or queue.given}
        fresh = [layout for layout in self.waiting if layout not in tried]
        return sorted(fresh, key=lambda layout: _distance(layout, leader, self.order))[:JOINERS]


def geomean(costs: Iterable[tuple[float, float]]) -> float:
    """Geometric mean of (value, weight) pairs."""
    total = weights = 0.0
    for value, weight in costs:
        total += weight * math.log(value) if math.isfinite(value) else math.inf
        weights += weight
    return math.exp(total / weights) if weights and math.isfinite(total) else math.inf


def search_queues(
    layout: Params, launches: Mapping[AnyWorkload, Iterable[Params]], starts: Mapping[str, Schedule], seed: int
) -> list[SearchQueue]:
    """One queue per workload, its launches in an order that depends on the seed alone. `starts`: the defaults of a back end, by workload
    key.
    """
    made = []
    for workload, params in launches.items():
        start = starts[workload.key]
        schedules = [Schedule(start.backend, layout, launch) for launch in params]
        random.Random(f"{seed}/{start.backend}[{layout}]/{workload.key}").shuffle(schedules)
        made.append(SearchQueue(layout, workload, {s.id: s for s in schedules}, start))
    return made
