"""Which point to measure next: layouts race each other, launches are searched over those that stay in the race.

The race begins with the layouts nearest to the default's, each with the launch nearest to its back end's default. Each later
round gives more launches to every layout, back end and workload and drops the worse half of the layouts, by the weighted
geometric mean of their best times, whoever reached them; where another layout has come to lead, its nearest neighbours join.
Over one layout back ends race by workload: who is far behind there waits. Who was left out is tried when nothing else is left.
With a budget that covers the whole space all race from the start, and nothing is dropped.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvgen.lower.schedule import Params, Schedule, Value
from kvgen.spec import Workload
from kvgen.tune.point import Key, Point, Record

STARTERS = 3
"""Most layouts in the first round: the defaults' and those that differ least from them."""
JOINERS = 2
"""Layouts that join where the lead has changed."""

NEARLY = 1.1
"""A launch within this factor of the best at one workload is worth a measurement at the others; a back end that is not within
it of the best over the same layout, after some launches, waits."""
PATIENCE = 3
"""Launches that a back end may try at a workload before it has to keep up."""


@dataclass
class Lane:
    """The launches of one back end over one layout at one workload: what is left to try, in the seed's order, and what was found."""

    layout: Params
    workload: Workload
    todo: dict[str, Schedule]
    start: Schedule
    """The back end's default."""
    given: int = 0
    best: Record | None = None
    found: list[Record] = field(default_factory=list)
    """Right ones, in the order in which they came."""

    @property
    def backend(self) -> str:
        """Name of the back end."""
        return self.start.backend

    def holds(self, point: Point) -> bool:
        """Whether a point is, or was, one of the lane's."""
        return (self.backend, self.layout, self.workload.key) == (point.backend, point.layout, point.workload.key)

    def take(self, schedule: Schedule) -> Point | None:
        """The point of a schedule that is still to be tried; None for any other."""
        found = self.todo.pop(schedule.id, None)
        return Point(found, self.workload) if found else None

    def nearest(self, to: Schedule, order: Mapping[str, Sequence[Value]]) -> Schedule | None:
        """The untried schedule that differs least from another: in few parameters, then by few steps."""
        return min(self.todo.values(), key=lambda s: _distance(s.launch, to.launch, order), default=None)


Suggest = Callable[[Lane], Schedule | None]


def _starters(layouts: Sequence[Params], away: Mapping[Params, tuple[int, int]]) -> list[Params]:
    """The nearest layout, and those that share the next distance."""
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
    """Gives points and takes their records. `exhaustive`: the budget covers all points, so nothing is dropped or guessed."""

    lanes: list[Lane]
    order: Mapping[str, Sequence[Value]]
    """Values of each parameter in the order of the space: neighbours are near."""
    suggest: Suggest
    exhaustive: bool
    quota: int = 1
    pending: set[Key] = field(default_factory=set)
    first: deque[Point] = field(default_factory=deque)
    alive: list[Params] = field(init=False)
    """Layouts in the race."""
    waiting: list[Params] = field(default_factory=list)
    """Layouts that were dropped, or have not joined yet."""
    _leader: Params | None = field(init=False, default=None)
    _everyone: bool = field(init=False, default=False)
    """Back ends that are far behind race, too."""

    def __post_init__(self) -> None:
        """Layouts in order of their distance from the nearest default."""
        away: dict[Params, tuple[int, int]] = {}
        for lane in self.lanes:
            distance = _distance(lane.layout, lane.start.layout, self.order)
            away[lane.layout] = min(distance, away.get(lane.layout, distance))
        self.alive = sorted(away, key=lambda layout: away[layout])
        self.lanes.sort(key=lambda lane: self.alive.index(lane.layout))
        self._everyone = self.exhaustive
        if not self.exhaustive:
            starters = _starters(self.alive, away)
            self.waiting = [layout for layout in self.alive if layout not in starters]
            self.alive = starters
        self._leader = self._best_layout()

    def lead(self, points: Iterable[Point]) -> None:
        """Give these points before any other."""
        for point in points:
            for lane in self.lanes:
                if lane.holds(point):
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

    def transfers(self, count: int) -> list[Point]:
        """Up to `count` points, of those only whose schedule did well at another workload, and so is compiled."""
        points: list[Point] = []
        for lane in self._racing():
            while len(points) < count and (guess := self._transfer(lane)) is not None:
                points.append(Point(lane.todo.pop(guess.id), lane.workload))
        self.pending.update(point.key for point in points)
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
        return [lane for lane in self.lanes if lane.layout in self.alive and (self._everyone or not self._far_behind(lane))]

    def _far_behind(self, lane: Lane) -> bool:
        """Whether another back end does clearly better over the same layout at the same workload."""
        if lane.best is None or lane.given < PATIENCE:
            return False
        rivals = (other for other in self.lanes if other.layout == lane.layout and other.workload.key == lane.workload.key)
        return any(other.best is not None and lane.best.cost > NEARLY * other.best.cost for other in rivals)

    def _propose(self, lane: Lane) -> Point:
        """A guess where one is worth something, else the next one in the seed's order."""
        guess: Schedule | None = None
        if lane.given == 1:
            guess = lane.nearest(lane.start, self.order)
        elif not self.exhaustive:
            guess = self._transfer(lane) or (self._neighbour(lane) if lane.given % 2 else self.suggest(lane))
        point = lane.take(guess) if guess else None
        return point or Point(lane.todo.pop(next(iter(lane.todo))), lane.workload)

    def _transfer(self, lane: Lane) -> Schedule | None:
        """The launch that did best, or nearly so, at another workload over the same layout: it is compiled already."""
        near: list[tuple[float, Schedule]] = []
        for other in self.lanes:
            if other.layout == lane.layout and other is not lane and other.best is not None:
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
            if lane.holds(record.point):
                lane.todo.pop(record.point.schedule.id, None)
                if record.ok:
                    lane.found.append(record)
                if record.ok and (lane.best is None or record.cost < lane.best.cost):
                    lane.best = record

    def forgo(self, point: Point) -> None:
        """Leave a given point to somebody else, whose record may come later."""
        self.pending.discard(point.key)

    def score(self, layout: Params) -> float:
        """Weighted geometric mean of the layout's best times in µs, of any back end; infinite while a workload has none."""
        best: dict[Workload, float] = {}
        for lane in self.lanes:
            if lane.layout == layout:
                best[lane.workload] = min(best.get(lane.workload, math.inf), lane.best.cost if lane.best else math.inf)
        return geomean((cost, workload.weight) for workload, cost in best.items())

    def _next_round(self) -> bool:
        """Begin another round; False when every point was given."""
        if not self.left:
            return False
        if not self.exhaustive:
            ranked = sorted(self.alive, key=self.score)
            keep = ranked[: -(-len(ranked) // 2)]
            joining = self._joiners()
            self.alive = keep + joining
            self.waiting = [layout for layout in ranked if layout not in keep] + [found for found in self.waiting if found not in joining]
        while not any(lane.todo for lane in self._racing()) and self.waiting:
            self.alive.append(self.waiting.pop(0))
        self._everyone = self._everyone or not any(lane.todo for lane in self._racing())
        self.quota = 2 * self.quota + 1
        return True

    def _best_layout(self) -> Params | None:
        """The best layout in the race; the first as long as none is measured."""
        return min(self.alive, key=self.score, default=None)

    def _joiners(self) -> list[Params]:
        """Layouts near a new leader that were never tried."""
        leader = self._best_layout()
        if leader is None or leader == self._leader:
            return []
        self._leader = leader
        tried = {lane.layout for lane in self.lanes if lane.best or lane.given}
        fresh = [layout for layout in self.waiting if layout not in tried]
        return sorted(fresh, key=lambda layout: _distance(layout, leader, self.order))[:JOINERS]


def geomean(costs: Iterable[tuple[float, float]]) -> float:
    """Geometric mean of (value, weight) pairs."""
    total = weights = 0.0
    for value, weight in costs:
        total += weight * math.log(value) if math.isfinite(value) else math.inf
        weights += weight
    return math.exp(total / weights) if weights and math.isfinite(total) else math.inf


def lanes(layout: Params, launches: Mapping[Workload, Iterable[Params]], start: Schedule, seed: int) -> list[Lane]:
    """One lane per workload for the back end of `start`, its launches in an order that depends on the seed alone."""
    made = []
    for workload, points in launches.items():
        schedules = [Schedule(start.backend, layout, launch) for launch in points]
        random.Random(f"{seed}/{start.backend}[{layout}]/{workload.key}").shuffle(schedules)
        made.append(Lane(layout, workload, {s.id: s for s in schedules}, start))
    return made
