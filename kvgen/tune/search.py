"""Which candidate is measured next, of all back ends and workloads of a spec; each study's model knows which schedules are likely.

The workload with the fewest measurements is next, in this build or in earlier ones, and at it the back end with the fewest. Every other
candidate is a launch that did well at another workload, which is compiled already, and whose layout is then known at all of them. A back
end that is far behind another at a workload waits until nothing else is left there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from kvgen.lower.schedule import Schedule
from kvgen.measure.measurement import Candidate, Key, Measurement
from kvgen.spec import AnyWorkload
from kvgen.tune.storage import Study

NEARLY, PATIENCE = 1.1, 3
"""A launch within this factor of the best at one workload is tried at the others. A back end that is not within it of the best, after
so many launches, waits.
"""


class Search:
    """Gives candidates and takes their records."""

    def __init__(self, studies: Mapping[tuple[str, AnyWorkload], Study]) -> None:
        """`studies` by back end and workload."""
        self._studies = dict(studies)
        self._works = list(dict.fromkeys(work for _, work in studies))
        self.records: dict[Key, Measurement] = {record.key: record for one in studies.values() for record in one.records.values()}
        """The last measurement of every candidate, of any build."""
        self._given = {key: len(study.records) for key, study in self._studies.items()}
        self.first: list[Candidate] = []
        """Candidates that come before all others and were not given yet."""
        self._pending: set[Candidate] = set()

    @property
    def left(self) -> int:
        """Candidates that were not given yet."""
        ahead = sum(not self._study(one).is_open(one.schedule) for one in self.first)
        return ahead + sum(study.left for study in self._studies.values())

    def lead(self, candidates: Iterable[Candidate]) -> None:
        """Give these, as far as they have no record, before any other."""
        self.first += [candidate for candidate in candidates if candidate.key not in self.records]

    def next(self, count: int) -> list[Candidate]:
        """Up to `count` candidates; fewer where none are left."""
        candidates: list[Candidate] = []
        while len(candidates) < count and (candidate := self._pick()) is not None:
            self._given[candidate.backend, candidate.workload] += 1
            candidates.append(candidate)
        self._pending.update(candidates)
        return candidates

    def finish(self, record: Measurement) -> None:
        """Store a record: of a candidate that was given, or a verdict that takes the place of an earlier one."""
        self._pending.discard(record.candidate)
        self._study(record.candidate).finish(record)
        self.records[record.key] = record

    def drop(self, candidate: Candidate) -> None:
        """Give a candidate no record now."""
        self._pending.discard(candidate)
        self._study(candidate).release(candidate.schedule)

    def end(self) -> None:
        """Drop all that were given and have no record."""
        for candidate in list(self._pending):
            self.drop(candidate)

    def read(self) -> None:
        """Take what other processes measured."""
        for study in self._studies.values():
            self.records |= {record.key: record for record in study.read()}
        self.first = [candidate for candidate in self.first if candidate.key not in self.records]

    def _study(self, candidate: Candidate) -> Study:
        return self._studies[candidate.backend, candidate.workload]

    def _pick(self) -> Candidate | None:
        if self.first:
            candidate = self.first.pop(0)
            self._study(candidate).claim(candidate.schedule, anyway=True)
            return candidate
        for work in sorted(self._works, key=lambda work: sum(self._given[key] for key in self._studies if key[1] == work)):
            while here := {key: study for key, study in self._studies.items() if key[1] == work and study.left}:
                key = min(here, key=lambda key: (self._behind(*key), self._given[key]))
                schedule = (self._transfer(*key) if self._given[key] % 2 else None) or here[key].propose()
                if here[key].claim(schedule):
                    return Candidate(schedule, work)
        return None

    def _behind(self, backend: str, work: AnyWorkload) -> bool:
        """Whether another back end is far better at the workload."""
        best = min(self._best(other, work) for other, at in self._studies if at == work)
        return len(self._studies[backend, work].records) >= PATIENCE and self._best(backend, work) > NEARLY * best

    def _best(self, backend: str, work: AnyWorkload) -> float:
        return min((record.cost for record in self._studies[backend, work].records.values()), default=math.inf)

    def _transfer(self, backend: str, work: AnyWorkload) -> Schedule | None:
        """The open launch that was best, or nearly, at another workload."""
        near: list[tuple[float, Schedule]] = []
        for other in (other for other in self._works if other != work):
            best = self._best(backend, other)
            records = self._studies[backend, other].records.values()
            near += [(record.cost / best, record.candidate.schedule) for record in records if record.cost <= NEARLY * best]
        near = [pair for pair in near if self._studies[backend, work].is_open(pair[1])]
        return min(near, key=lambda pair: pair[0])[1] if near else None


def geomean(costs: Iterable[tuple[float, float]]) -> float:
    """Geometric mean of (value, weight) pairs."""
    total = weights = 0.0
    for value, weight in costs:
        total += weight * math.log(value) if math.isfinite(value) else math.inf
        weights += weight
    return math.exp(total / weights) if weights and math.isfinite(total) else math.inf
