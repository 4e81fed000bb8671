"""The time of every schedule that can be built for a spec: a table over which `benchmarks.replay` lets samplers search.

    python -m benchmarks.exhaustive SPEC --csv FILE [--hints] [--where copy=cp_async block=128,256] [--workload 8x32768] [--seconds 570]

Measures all schedules that the constraints allow, of the first back end alone, at every workload of the spec: compiled on all cores, ahead
of the device, timed for 50 ms, not verified. It ends after `--seconds`, and continues where the file ends, also from another machine of
the same kind. `--where` leaves out what has other values, `--hints` what the hints of the space exclude; `--dry` counts what is left, and
`--compile` only compiles it into the cache, also for a machine with a GPU and the same nvcc and g++ (`--arch sm90`). With several
`--passes` every schedule is timed so often, at times far apart, and its least median counts: other load seldom disturbs all of them.

A row has a schedule's parameters, the workloads of which it is the default, its passes, and its µs per workload; 0 where it fails or cannot
be built for that workload.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import TimeoutError as Timeout
from concurrent.futures import as_completed
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from kvgen.cli.options import resolve_any_spec
from kvgen.errors import CompileError, KvgenError
from kvgen.lower.backend import Sources
from kvgen.lower.schedule import Schedule
from kvgen.lower.space import SearchSpace
from kvgen.measure.measurement import Job, TimingPolicy
from kvgen.measure.worker import Worker
from kvgen.spec import AnySpec
from kvgen.spec.target import resolve
from kvgen.toolchain import Artifact, ArtifactCache
from kvgen.toolchain.compile import CompilePool, build
from kvgen.tune.candidates import Contender, contenders

POLICY = TimingPolicy(seconds=0.05, warmup_seconds=0.02)
BATCH = 16
"""Schedules that are compiled before a CPU times them."""
Row = dict[str, Any]


def main() -> None:
    """The command."""
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("spec")
    command.add_argument("--csv", type=Path, required=True)
    command.add_argument("--where", nargs="*", default=[], metavar="NAME=VALUE,…")
    command.add_argument("--workload", nargs="*", metavar="BxL")
    command.add_argument("--arch")
    command.add_argument("--seconds", type=float, default=570.0)
    command.add_argument("--passes", type=int, default=1)
    command.add_argument("--hints", action="store_true")
    command.add_argument("--dry", action="store_true")
    command.add_argument("--compile", action="store_true")
    given = command.parse_args()
    spec = resolve_any_spec(given.spec, given.arch, given.workload)
    target = resolve(spec.arch)
    contender = contenders(spec, target, all_schedules=not given.hints)[0][0]
    table = Table(given.csv, contender, spec)
    schedules = [one for one in contender.space.schedules() if kept(one, given.where)]
    random.Random(0).shuffle(schedules)  # a table that is not whole yet is a sample
    todo = [(number, one) for number in range(given.passes) for one in schedules if table.passes(one) <= number]
    print(f"{spec.name} on {target}: {len(schedules)} schedules, {len(todo)} to time", flush=True)
    if not given.dry:
        until = time.monotonic() + given.seconds
        sources = Sources(spec, target, {contender.backend.name: contender.backend})
        with nullcontext() if given.compile else Worker() as worker, CompilePool() as pool:
            for number, (schedule, artifact) in enumerate(compiled([one for _, one in todo], sources, pool, until)):
                if worker is None:
                    continue
                table.add(schedule, times(spec, sources, contender.space, schedule, artifact, worker))
                if number % 50 == 0:
                    print(f"{number} of {len(todo)}, {max(0.0, until - time.monotonic()):.0f} s left", flush=True)
            pool.stop()
    print(f"{sum(table.passes(one) >= given.passes for one in schedules)} of {len(schedules)} are in {given.csv}")
    sys.stdout.flush()


class Table:
    """The file of a table."""

    def __init__(self, file: Path, contender: Contender, spec: AnySpec) -> None:
        self.file, self._works = file, [work.key for work in spec.workloads]
        self._names = [(p.part, p.name) for p in contender.space.parameters]
        self._defaults = contender.at_workloads
        self.rows: dict[tuple[str, ...], Row] = {}
        if file.exists():
            with file.open(encoding="utf-8") as lines:
                self.rows = {tuple(row[f"{part}.{name}"] for part, name in self._names): row for row in csv.DictReader(lines)}

    def passes(self, schedule: Schedule) -> int:
        """How often a schedule was timed."""
        return int(self.rows.get(self._key(schedule), {}).get("passes", 0))

    def add(self, schedule: Schedule, us: Sequence[float]) -> None:
        """Times of a pass. The file is whole at any moment."""
        key = self._key(schedule)
        row = self.rows.get(key) or {f"{part}.{name}": value for (part, name), value in zip(self._names, key, strict=True)}
        before = [float(row.get(work, 0.0)) for work in self._works]
        least = [f"{min(filter(None, pair), default=0.0):.5g}" for pair in zip(before, us, strict=True)]
        row["default"] = " ".join(work for work in self._works if self._defaults[work] == schedule)
        self.rows[key] = {**row, "passes": self.passes(schedule) + 1, **dict(zip(self._works, least, strict=True))}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        part = self.file.with_suffix(".part")
        with part.open("w", encoding="utf-8", newline="") as lines:
            writer = csv.DictWriter(lines, list(self.rows[key]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows.values())
        os.replace(part, self.file)

    def _key(self, schedule: Schedule) -> tuple[str, ...]:
        return tuple(str((schedule.layout if part == "layout" else schedule.launch)[name]) for part, name in self._names)


def kept(schedule: Schedule, where: Sequence[str]) -> bool:
    """Whether a schedule has one of the values that each condition names."""
    params = {**schedule.layout, **schedule.launch}
    conditions = (condition.split("=", 1) for condition in where)
    return all(str(params[name]).lower() in values.lower().split(",") for name, values in conditions)


def compiled(
    schedules: Sequence[Schedule], sources: Sources, pool: CompilePool, until: float
) -> Iterator[tuple[Schedule, Artifact | None]]:
    """Schedules with their modules (None of one that does not compile), in batches that are whole before a CPU times them; as they come on
    a GPU. Ends when the time is over.
    """
    cache, exclusive = ArtifactCache(), sources.target == "cpu"
    batch = BATCH if exclusive else max(1, len(schedules))
    for start in range(0, len(schedules), batch):
        jobs = {pool.submit(build, sources.of(one), cache): one for one in schedules[start : start + batch]}
        try:
            for job in list(as_completed(jobs, until - time.monotonic())) if exclusive else as_completed(jobs, until - time.monotonic()):
                if time.monotonic() >= until:
                    return
                error = job.exception()
                if error is not None and not isinstance(error, CompileError):
                    raise error
                yield jobs[job], None if error else job.result()
        except Timeout:
            return


def times(
    spec: AnySpec, sources: Sources, space: SearchSpace, schedule: Schedule, artifact: Artifact | None, worker: Worker
) -> list[float]:
    """Median µs at each workload; 0 where the schedule fails or cannot be built for it."""
    found = []
    for work in spec.workloads:
        us = 0.0
        if artifact is not None and not space.check(schedule, work):
            measured = worker.run(Job(spec, schedule, sources.target, artifact.path, work, None, POLICY))
            us = measured.us or 0.0 if measured.ok else 0.0
        found.append(us)
    return found


if __name__ == "__main__":
    try:
        main()
    except KvgenError as error:
        sys.exit(str(error))
