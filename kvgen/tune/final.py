"""The final: the best candidates of a search, measured again side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from kvgen.lower.schedule import Schedule
from kvgen.spec import AnyWorkload
from kvgen.toolchain import Artifact
from kvgen.tune.budget import AGAIN, Clock
from kvgen.tune.candidate import Candidate, Record
from kvgen.tune.compile_queue import CompileQueue
from kvgen.tune.decide import finalists, unclear
from kvgen.tune.progress import Phase
from kvgen.tune.runner import Runner


@dataclass(frozen=True)
class Final:
    """The final of a run. `defaults` and `present`, both by workload key, are the launches to beat."""

    workloads: Sequence[AnyWorkload]
    defaults: Mapping[str, Schedule]
    present: Mapping[str, Schedule]
    runner: Runner
    queue: CompileQueue
    clock: Clock
    tell: Callable[[Phase, str], None]

    def measure(self, known: Sequence[Record], keep: Sequence[Candidate]) -> list[Record]:
        """The finalists' records. `known` are the records of the search; those of `keep` that were right take part whatever their times."""
        right = {record.candidate.key for record in known if record.ok}
        candidates = finalists(known, self.workloads, [candidate for candidate in keep if candidate.key in right])
        if not candidates:
            return []
        for candidate in candidates:
            self.queue.start(candidate.schedule)
        if self.runner.exclusive:
            self.queue.wait_idle()
        self.tell("finalists", f"{len(candidates)} finalists are timed side by side")
        entrants = [(candidate, self.queue.artifact(candidate.schedule)) for candidate in candidates]
        left = self.clock.final_left
        records = self._again(self.runner.final(entrants, None if left is None else left * (1 - AGAIN)), dict(entrants))
        accuracy = {record.candidate.key: record.accuracy for record in known}
        return [replace(record, accuracy=accuracy[record.candidate.key]) for record in records]

    def _again(self, records: Sequence[Record], artifacts: Mapping[Candidate, Artifact]) -> list[Record]:
        """The final's records, with more rounds for all finalists of workloads whose winner is unclear, if time is left."""
        works = {w.key for w in unclear(records, self.workloads, self.defaults, self.present, self.runner.compare)}
        candidates = [record.candidate for record in records if record.ok and record.candidate.workload.key in works]
        left = self.clock.final_left
        if not candidates or (left is not None and left < self.runner.shortest_final(len(candidates))):
            return list(records)
        self.tell("finalists", f"{len(candidates)} finalists are timed again")
        more: dict[Candidate, Record] = {}
        with suppress(KeyboardInterrupt):  # the final is complete without them
            again = self.runner.final([(candidate, artifacts[candidate]) for candidate in candidates], left)
            more = {record.candidate: record for record in again}
        return [record.joined(more[record.candidate]) if record.candidate in more else record for record in records]
