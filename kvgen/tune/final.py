"""The final: the best candidates of a search, measured again side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvgen.errors import CompileError, CompilerCrash, ToolchainMissing, UnsupportedError
from kvgen.lower.schedule import Schedule
from kvgen.spec import AnyWorkload
from kvgen.toolchain import Artifact
from kvgen.tune.budget import AGAIN, Clock
from kvgen.tune.candidate import Candidate, Record
from kvgen.tune.compile_queue import CompileQueue
from kvgen.tune.decide import finalists, unclear
from kvgen.tune.progress import Phase
from kvgen.tune.runner import Runner, verified


@dataclass
class Final:
    """The final of a run. `defaults` and `present`, both by workload key, are the launches to beat."""

    workloads: Sequence[AnyWorkload]
    defaults: Mapping[str, Schedule]
    present: Mapping[str, Schedule]
    runner: Runner
    queue: CompileQueue
    clock: Clock
    tell: Callable[[Phase, str], None]
    interrupted: bool = False
    """Whether Ctrl-C ended the further rounds. The final is complete without them."""
    left_out: dict[Schedule, str] = field(default_factory=dict)
    """Finalists that could not be compiled here, with the reason: an earlier run or another host measured them."""

    def measure(self, known: Callable[[], Sequence[Record]], refute: Callable[[Record], None], keep: Sequence[Candidate]) -> list[Record]:
        """The finalists' records. `known` gives the records of the search; those of `keep` that were right take part whatever their times.

        Earlier runs and other hosts measured modules of their own, so a finalist that this run has not verified is verified first. One
        that fails is told to `refute`, whose caller replaces its record, and others take its place.
        """
        entrants = self._entrants(known, refute, keep)
        if not entrants:
            return []
        self.tell("finalists", f"{len(entrants)} finalists are timed side by side")
        left = self.clock.left
        records = self._again(self.runner.final(entrants, None if left is None else left * (1 - AGAIN)), dict(entrants))
        passed = {candidate: self.runner.passed[artifact.sha256, candidate.workload.key] for candidate, artifact in entrants}
        return [replace(record, accuracy=passed[record.candidate]) for record in records]

    def _entrants(
        self, known: Callable[[], Sequence[Record]], refute: Callable[[Record], None], keep: Sequence[Candidate]
    ) -> list[tuple[Candidate, Artifact]]:
        while True:
            right = {record.candidate.key for record in known() if record.ok}
            candidates = finalists(known(), self.workloads, [candidate for candidate in keep if candidate.key in right])
            for candidate in candidates:
                self.queue.start(candidate.schedule)
            if self.runner.exclusive:
                self.queue.wait_idle()
            entrants = self._compiled(candidates)
            judged = (verified(self.runner, candidate, artifact) for candidate, artifact in entrants)
            failed = next((record for record in judged if not record.right), None)
            if failed is None:
                return entrants
            refute(failed)

    def _compiled(self, candidates: Sequence[Candidate]) -> list[tuple[Candidate, Artifact]]:
        found = [(candidate, self._artifact(candidate.schedule)) for candidate in candidates]
        return [(candidate, artifact) for candidate, artifact in found if artifact is not None]

    def _artifact(self, schedule: Schedule) -> Artifact | None:
        try:
            return self.queue.artifact(schedule)
        except (CompileError, CompilerCrash, ToolchainMissing, UnsupportedError) as error:
            self.left_out[schedule] = str(error)
            return None

    def _again(self, records: Sequence[Record], artifacts: Mapping[Candidate, Artifact]) -> list[Record]:
        """The final's records, with more rounds for all finalists of workloads whose winner is unclear, if time is left."""
        works = {w.key for w in unclear(records, self.workloads, self.defaults, self.present, self.runner.compare)}
        candidates = [record.candidate for record in records if record.ok and record.candidate.workload.key in works]
        left = self.clock.left
        if not candidates or (left is not None and left < self.runner.shortest_final(len(candidates))):
            return list(records)
        self.tell("finalists", f"{len(candidates)} finalists are timed again")
        more: dict[Candidate, Record] = {}
        try:
            again = self.runner.final([(candidate, artifacts[candidate]) for candidate in candidates], left)
            more = {record.candidate: record for record in again}
        except KeyboardInterrupt:
            self.interrupted = True
        return [record.joined(more[record.candidate]) if record.candidate in more else record for record in records]
