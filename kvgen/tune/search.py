"""Which candidate is measured next: successive halving among layouts, and a search among the launches of each.

The first round has the layouts nearest to the default's, each with the launch nearest to its back end's default. Each later round gives
more launches to every layout, back end and workload, and sets the worse half of the layouts aside, by the weighted geometric mean of
their best times of any back end; the untried layout nearest to the best one joins. Within a layout, a back end that is far behind another
at a workload is set aside there. What was set aside is tried when nothing else is left. If the budget covers the space, all is tried in
the seed's order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvgen.lower.schedule import Params, Schedule, Value
from kvgen.measure.measurement import Candidate, Key, Measurement
from kvgen.spec import AnyWorkload
from kvgen.tune.candidates import Contender

STARTERS = 3
"""Layouts of the first round."""
NEARLY, PATIENCE = 1.1, 3
"""A launch within this factor of the best at one workload is tried at the others. A back end that is not within it of the best, after
so many launches, is set aside.
"""

Order = Mapping[str, Sequence[Value]]
"""Values of each parameter in the order of the space: neighbours are near."""


@dataclass
class Queue:
    """The launches of one back end over one layout at one workload: those to try, in the seed's order, and what was measured."""

    layout: Params
    workload: AnyWorkload
    start: Schedule
    """The back end's default at the workload."""
    todo: dict[str, Schedule]
    given: int = 0
    found: list[Measurement] = field(default_factory=list)
    """Successful measurements."""
    best: Measurement | None = None

    @property
    def cost(self) -> float:
        """µs of the best launch so far, infinite without one."""
        return self.best.cost if self.best else math.inf

    def nearest(self, to: Schedule, order: Order) -> Schedule | None:
        """The untried schedule that differs least from another: in the fewest parameters, then by the fewest steps."""
        return min(self.todo.values(), key=lambda s: _distance(s.launch, to.launch, order), default=None)


Suggest = Callable[[Queue], Schedule]


def open_queues(workloads: Sequence[AnyWorkload], contender: Contender, seed: int) -> list[Queue]:
    """The whole space of a back end, in an order that depends on the seed alone."""
    queues = []
    for layout in contender.space.layouts():
        for work in workloads:
            start = contender.at_workloads[work.key]
            schedules = [Schedule(start.backend, layout, launch) for launch in contender.space.launches(layout, work)]
            random.Random(f"{seed}/{start.backend}[{layout}]/{work.key}").shuffle(schedules)
            queues.append(Queue(layout, work, start, {s.id: s for s in schedules}))
    return queues


class Search:
    """Gives candidates and takes their records. `exhaustive`: the budget covers all candidates. `shared`: other processes search as well,
    and each goes through back ends, layouts and workloads in an order of its own, so that they seldom measure the same at once.
    """

    def __init__(self, queues: Sequence[Queue], order: Order, suggest: Suggest, *, exhaustive: bool, shared: bool = False) -> None:
        """`suggest` gives a schedule over a queue's layout; the untried one nearest to it is tried."""
        self._order, self._suggest, self._exhaustive = order, suggest, exhaustive
        ranked = sorted(queues, key=lambda q: _distance(q.layout, q.start.layout, order))
        self._alive = list(dict.fromkeys(q.layout for q in ranked))[: None if exhaustive else STARTERS]
        if shared:
            random.shuffle(ranked)
        self._queues = {(q.start.backend, q.layout, q.workload.key): q for q in ranked}
        self._quota = math.inf if exhaustive else 1
        self._everything = exhaustive
        """Whether back ends that are far behind take part, too."""
        self.first: list[Candidate] = []
        """Candidates that come before all others and were not given yet."""
        self._pending: set[Key] = set()

    @property
    def left(self) -> int:
        """Candidates that were not given yet."""
        return len(self.first) + sum(len(queue.todo) for queue in self._queues.values())

    def lead(self, candidates: Iterable[Candidate]) -> None:
        """Give these candidates before any other."""
        for candidate in candidates:
            self._drop(candidate)
            self.first.append(candidate)

    def next(self, count: int) -> list[Candidate]:
        """Up to `count` candidates; fewer, or none, if the next ones depend on pending records, or if none are left."""
        candidates: list[Candidate] = []
        while len(candidates) < count and (candidate := self._pick()) is not None:
            self._pending.add(candidate.key)
            candidates.append(candidate)
        return candidates

    def take(self, record: Measurement) -> None:
        """Use a record: of a candidate that was given, or of another process or an earlier build."""
        self._pending.discard(record.candidate.key)
        self.first = [candidate for candidate in self.first if candidate.key != record.candidate.key]
        queue = self._drop(record.candidate)
        if queue is not None and record.timed:
            queue.found.append(record)
            if record.cost < queue.cost:
                queue.best = record

    def score(self, layout: Params) -> float:
        """Weighted geometric mean of the layout's best times in µs, of any back end; infinite while a workload has none."""
        best: dict[AnyWorkload, float] = {}
        for queue in self._queues.values():
            if queue.layout == layout:
                best[queue.workload] = min(best.get(queue.workload, math.inf), queue.cost)
        return geomean((cost, workload.weight) for workload, cost in best.items())

    def _queue(self, candidate: Candidate) -> Queue | None:
        return self._queues.get((candidate.backend, candidate.layout, candidate.workload.key))

    def _drop(self, candidate: Candidate) -> Queue | None:
        """The candidate's queue, which no longer has it to try."""
        queue = self._queue(candidate)
        if queue is not None:
            queue.todo.pop(candidate.schedule.id, None)
        return queue

    def _pick(self) -> Candidate | None:
        if self.first:
            return self.first.pop(0)
        while True:
            open_now = [queue for queue in self._racing() if queue.todo and queue.given < self._quota]
            if open_now:
                queue = min(open_now, key=lambda one: one.given)
                queue.given += 1
                return Candidate(queue.todo.pop(self._propose(queue).id), queue.workload)
            if self._pending or not self.left:
                return None
            self._next_round()

    def _racing(self) -> list[Queue]:
        """Queues of the layouts that take part, without those of back ends that another leaves far behind over the same layout."""
        if self._everything:
            return list(self._queues.values())
        racing = [queue for queue in self._queues.values() if queue.layout in self._alive]
        fastest: dict[tuple[Params, str], float] = {}
        for queue in racing:
            place = queue.layout, queue.workload.key
            fastest[place] = min(queue.cost, fastest.get(place, math.inf))
        limit = {place: NEARLY * cost for place, cost in fastest.items()}
        return [q for q in racing if q.best is None or q.given < PATIENCE or q.cost <= limit[q.layout, q.workload.key]]

    def _next_round(self) -> None:
        """More launches for the better half of the layouts and for one that was not tried; for all if these have none left."""
        ranked = sorted(self._alive, key=self.score)
        tried = {queue.layout for queue in self._queues.values() if queue.best or queue.given}
        others = [layout for layout in dict.fromkeys(queue.layout for queue in self._queues.values()) if layout not in tried]
        joining = sorted(others, key=lambda layout: _distance(layout, ranked[0], self._order))[:1]
        self._alive = ranked[: -(-len(ranked) // 2)] + joining
        if not any(queue.todo for queue in self._racing()):
            self._alive = list(dict.fromkeys(queue.layout for queue in self._queues.values()))
            self._everything = not any(queue.todo for queue in self._racing())
        self._quota = 2 * self._quota + 1

    def _propose(self, queue: Queue) -> Schedule:
        """The most promising untried schedule; where the budget covers the space the next in the seed's order."""
        guess: Schedule | None = None
        if queue.given == 1:
            guess = queue.nearest(queue.start, self._order)
        elif not self._exhaustive:
            guess = self._transfer(queue)
            if guess is None and queue.best is not None:
                center = queue.best.candidate.schedule if queue.given % 2 else self._suggest(queue)
                guess = queue.nearest(center, self._order)
        return guess or next(iter(queue.todo.values()))

    def _transfer(self, queue: Queue) -> Schedule | None:
        """The launch that was best, or nearly, at another workload over the same layout; it is already compiled."""
        near: list[tuple[float, Schedule]] = []
        for other in self._queues.values():
            if other.layout == queue.layout and other is not queue and other.best is not None:
                ratios = ((record.cost / other.cost, record.candidate.schedule) for record in other.found)
                near += [(ratio, schedule) for ratio, schedule in ratios if ratio <= NEARLY and schedule.id in queue.todo]
        return min(near, key=lambda item: item[0])[1] if near else None


def _distance(one: Params, other: Params, order: Order) -> tuple[int, int]:
    """In how many parameters two parts of schedules differ, and by how many steps."""
    changed = steps = 0
    for name, value in one.items():
        if name not in other or other[name] != value:
            changed += 1
            values = order.get(name, ())
            if name in other and value in values and other[name] in values:
                steps += abs(values.index(value) - values.index(other[name]))
    return changed, steps


def geomean(costs: Iterable[tuple[float, float]]) -> float:
    """Geometric mean of (value, weight) pairs."""
    total = weights = 0.0
    for value, weight in costs:
        total += weight * math.log(value) if math.isfinite(value) else math.inf
        weights += weight
    return math.exp(total / weights) if weights and math.isfinite(total) else math.inf
