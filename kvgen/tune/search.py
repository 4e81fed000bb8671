"""Which point to measure next: layouts race each other, launches are searched over those that stay in the race.

The race begins with the layouts nearest to the default's, each with the launch nearest to the default's. Each later round
gives more launches to every layout and workload and drops the worse half of the layouts, by the weighted geometric mean of
their best times; where another layout has come to lead, its nearest neighbours join. Who was left out is tried when nothing
else is left. With a budget that covers the whole space all layouts race from the start, and nothing is dropped.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvgen.lower.schedule import Params, Schedule, Value
from kvgen.spec import Workload
from kvgen.tune.point import Arm, Key, Point, Record

STARTERS = 3
"""Most layouts per back end in the first round: the default's and those that differ least from it."""
JOINERS = 2
"""Layouts that join where the lead has changed."""

NEARLY = 1.1
"""A launch within this factor of the best at one workload is worth a measurement at the others."""

Suggest = Callable[[Arm, Workload], Schedule | None]


@dataclass
class Lane:
    """The launches of one layout at one workload: what is left to try, in the seed's order, and what was found."""

    arm: Arm
    workload: Workload
    todo: dict[str, Schedule]
    start: Schedule
    given: int = 0
    best: Record | None = None
    found: list[Record] = field(default_factory=list)
    """Right ones, in the order in which they came."""

    def take(self, schedule: Schedule) -> Point | None:
        """The point of a schedule that is still to be tried; None for any other."""
        found = self.todo.pop(schedule.id, None)
        return Point(found, self.workload) if found else None

    def nearest(self, to: Schedule, order: Mapping[str, Sequence[Value]]) -> Schedule | None:
        """The untried schedule that differs least from another: in few parameters, then by few steps."""
        return min(self.todo.values(), key=lambda s: _distance(s.launch, to.launch, order), default=None)


def _starters(arms: Sequence[Arm], away: Mapping[Arm, tuple[int, int]]) -> list[Arm]:
    """The nearest arm, and those that share the next distance."""
    second = min((away[arm] for arm in arms[1:]), default=(0, 0))
    return [arm for arm in arms if away[arm] <= second][:STARTERS]


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
    """Gives points and takes their records. `exhaustive`: the budget covers all points, so nothing is dropped or guessed."""

    lanes: list[Lane]
    order: Mapping[str, Sequence[Value]]
    """Values of each parameter in the order of the space: neighbours are near."""
    suggest: Suggest
    exhaustive: bool
    quota: int = 1
    pending: set[Key] = field(default_factory=set)
    first: deque[Point] = field(default_factory=deque)
    alive: list[Arm] = field(init=False)
    waiting: list[Arm] = field(default_factory=list)
    """Layouts that were dropped, or have not joined yet."""
    _leaders: dict[str, Arm | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Arms in order of their distance from the default of their back end."""
        starts = {lane.arm.backend: lane.start.layout for lane in self.lanes}
        away = {lane.arm: _distance(lane.arm.layout, starts[lane.arm.backend], self.order) for lane in self.lanes}
        self.alive = sorted(away, key=lambda arm: away[arm])
        self.lanes.sort(key=lambda lane: self.alive.index(lane.arm))
        if not self.exhaustive:
            starters = [arm for backend in starts for arm in _starters([a for a in self.alive if a.backend == backend], away)]
            self.waiting = [arm for arm in self.alive if arm not in starters]
            self.alive = [arm for arm in self.alive if arm in starters]
        self._leaders = {backend: self._leader(backend) for backend in starts}

    def lead(self, points: Iterable[Point]) -> None:
        """Give these points before any other."""
        for point in points:
            for lane in self.lanes:
                if lane.arm == point.arm and lane.workload.key == point.workload.key:
                    lane.take(point.schedule)
            self.first.append(point)

    # --- giving ----------------------------------------------------------------------------------------------------

    def next(self, count: int) -> list[Point]:
        """Up to `count` points. Fewer, or none, where outcomes of pending points decide what comes next, or nothing is left."""
        points: list[Point] = []
        while len(points) < count:
            point = self._pick()
            if point is None:
                break
            self.pending.add(point.key)
            points.append(point)
        return points

    @property
    def left(self) -> int:
        """Points not yet given."""
        return len(self.first) + sum(len(lane.todo) for lane in self.lanes)

    def _pick(self) -> Point | None:
        if self.first:
            return self.first.popleft()
        while True:
            open_lanes = [lane for lane in self._racing() if lane.todo and lane.given < self.quota]
            if open_lanes:
                lane = min(open_lanes, key=lambda found: found.given)
                lane.given += 1
                return self._propose(lane)
            if self.pending or not self._next_round():
                return None

    def _racing(self) -> list[Lane]:
        return [lane for lane in self.lanes if lane.arm in self.alive]

    def _propose(self, lane: Lane) -> Point:
        """A guess where one is worth something, else the next one in the seed's order."""
        guess: Schedule | None = None
        if lane.given == 1:
            guess = lane.nearest(lane.start, self.order)
        elif not self.exhaustive:
            guess = self._transfer(lane) or (self._neighbour(lane) if lane.given % 2 else self.suggest(lane.arm, lane.workload))
        point = lane.take(guess) if guess else None
        return point or Point(lane.todo.pop(next(iter(lane.todo))), lane.workload)

    def _transfer(self, lane: Lane) -> Schedule | None:
        """The launch that did best, or nearly so, at another workload over the same layout: it is compiled already."""
        near: list[tuple[float, Schedule]] = []
        for other in self.lanes:
            if other.arm == lane.arm and other is not lane and other.best is not None:
                ratios = ((record.cost / other.best.cost, record.point.schedule) for record in other.found)
                near += [(ratio, schedule) for ratio, schedule in ratios if ratio <= NEARLY and schedule.id in lane.todo]
        return min(near, key=lambda item: item[0])[1] if near else None

    def _neighbour(self, lane: Lane) -> Schedule | None:
        return lane.nearest(lane.best.point.schedule, self.order) if lane.best else None

    # --- taking ----------------------------------------------------------------------------------------------------

    def take(self, record: Record) -> None:
        """Learn from a record: one that was asked for, or one of an earlier run."""
        self.pending.discard(record.point.key)
        for lane in self.lanes:
            if lane.arm == record.point.arm and lane.workload.key == record.point.workload.key:
                lane.todo.pop(record.point.schedule.id, None)
                if record.ok:
                    lane.found.append(record)
                if record.ok and (lane.best is None or record.cost < lane.best.cost):
                    lane.best = record

    def forgo(self, point: Point) -> None:
        """Leave a given point to somebody else, whose record may come later."""
        self.pending.discard(point.key)

    def score(self, arm: Arm) -> float:
        """Weighted geometric mean of the layout's best times in µs; infinite while a workload has none."""
        return geomean((lane.best.cost if lane.best else math.inf, lane.workload.weight) for lane in self.lanes if lane.arm == arm)

    def _next_round(self) -> bool:
        """Begin another round; False when every point was given."""
        if not self.left:
            return False
        if not self.exhaustive:
            ranked = sorted(self.alive, key=self.score)
            keep = ranked[: -(-len(ranked) // 2)]
            joining = [arm for backend in self._leaders for arm in self._joiners(backend)]
            self.alive = keep + joining
            self.waiting = [arm for arm in ranked if arm not in keep] + [arm for arm in self.waiting if arm not in joining]
        while not any(lane.todo for lane in self._racing()) and self.waiting:
            self.alive.append(self.waiting.pop(0))
        self.quota = 2 * self.quota + 1
        return True

    def _leader(self, backend: str) -> Arm | None:
        """The best layout of a back end in the race; the first as long as none is measured."""
        mine = [arm for arm in self.alive if arm.backend == backend]
        return min(mine, key=self.score, default=None)

    def _joiners(self, backend: str) -> list[Arm]:
        """Layouts near a new leader that were never tried."""
        leader = self._leader(backend)
        if leader is None or leader == self._leaders[backend]:
            return []
        self._leaders[backend] = leader
        tried = {lane.arm for lane in self.lanes if lane.best or lane.given}
        fresh = [arm for arm in self.waiting if arm.backend == backend and arm not in tried]
        return sorted(fresh, key=lambda arm: _distance(arm.layout, leader.layout, self.order))[:JOINERS]


def geomean(costs: Iterable[tuple[float, float]]) -> float:
    """Geometric mean of (value, weight) pairs."""
    total = weights = 0.0
    for value, weight in costs:
        total += weight * math.log(value) if math.isfinite(value) else math.inf
        weights += weight
    return math.exp(total / weights) if weights and math.isfinite(total) else math.inf


def lanes(arm: Arm, launches: Mapping[Workload, Iterable[Params]], start: Schedule, seed: int) -> list[Lane]:
    """One lane per workload, its launches in an order that depends on the seed alone."""
    made = []
    for workload, points in launches.items():
        schedules = [arm.schedule(launch) for launch in points]
        random.Random(f"{seed}/{arm}/{workload.key}").shuffle(schedules)
        made.append(Lane(arm, workload, {s.id: s for s in schedules}, start))
    return made
