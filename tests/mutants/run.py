"""Plant faults one by one, and see whether verification alone catches each.

    python -m tests.mutants.run cpu|cuda [--jobs N] [--only NAME ...] [--out FILE.json]

Every case must pass without a fault first: else the suite proves nothing, and the exit code is 2. It is 0 where all faults were caught,
1 where some survive, 3 where one could not be planted or does not compile. `--compile` stops before anything runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from kvgen.measure.device import fingerprint
from kvgen.measure.measurement import Measurement
from kvgen.toolchain import Artifact, ArtifactCache, build
from tests.mutants.fault import Case, Fault
from tests.mutants.judge import Judges
from tests.mutants.plant import faulty_source
from tests.mutants.suite import CASES, SUITES

Say = Callable[[str], None]


class Suite:
    """Some faults, compiled by `jobs` compilers at a time, in a folder of their own."""

    def __init__(self, faults: Sequence[Fault], cases: dict[str, Case], folder: Path, jobs: int, say: Say = print) -> None:
        self.faults = faults
        self.cases = {name: cases[name] for name in dict.fromkeys(fault.case for fault in faults)}
        self._folder, self._say = folder, say
        self._cache = ArtifactCache(folder / "cache")
        self._pool = ThreadPoolExecutor(jobs, thread_name_prefix="compile")
        self._sound = {name: self._pool.submit(lambda case: self._build(case, None), case) for name, case in self.cases.items()}
        self._built = {fault.name: self._pool.submit(self._build, self.cases[fault.case], fault) for fault in faults}

    def _build(self, case: Case, fault: Fault | None) -> Artifact:
        source = case.source() if fault is None else faulty_source(fault, case, self._folder / fault.name)
        return build(source, self._cache)

    def broken(self) -> dict[str, str]:
        """Cases and faults that do not compile or cannot be planted, by name; waits for all compilers."""
        futures = {**{f"case {name}": future for name, future in self._sound.items()}, **self._built}
        errors = {name: future.exception() for name, future in futures.items()}
        return {name: str(error)[:2000] for name, error in errors.items() if error is not None}

    def unsound(self, judges: Judges) -> dict[str, str]:
        """Cases that fail without a fault, by name."""
        found: dict[str, str] = {}

        def judge(name: str) -> tuple[str, Measurement]:
            error = self._sound[name].exception()
            refused = Measurement("compile_error", str(error)[:2000])
            return name, refused if error is not None else judges.judge(self.cases[name], self._sound[name].result().path)

        with ThreadPoolExecutor(judges.size) as pool:
            for name, outcome in pool.map(judge, self.cases):
                self._say(f"sound    {name}: {outcome.kind} {outcome.detail} ({outcome.seconds:.1f} s)")
                if outcome.kind != "ok":
                    found[name] = f"{outcome.kind}: {outcome.detail}"
        return found

    def rows(self, judges: Judges) -> list[dict[str, Any]]:
        """What came of every fault that compiles, in their order."""
        lock = threading.Lock()

        def judge(fault: Fault) -> dict[str, Any] | None:
            if self._built[fault.name].exception() is not None:
                return None  # see `broken`
            started = time.monotonic()
            outcome = judges.judge(self.cases[fault.case], self._built[fault.name].result().path)
            row = row_of(fault, outcome.kind, outcome.detail, time.monotonic() - started)
            with lock:
                self._say(f"{'caught  ' if row['caught'] else 'SURVIVED'} {fault.name} ({fault.case}): {outcome.kind} {outcome.detail}")
            return row

        with ThreadPoolExecutor(judges.size) as pool:
            futures: dict[str, Future[dict[str, Any] | None]] = {fault.name: pool.submit(judge, fault) for fault in self._in_order()}
            return [row for fault in self.faults if (row := futures[fault.name].result()) is not None]

    def _in_order(self) -> list[Fault]:
        """By case, so that a worker's reference results serve the next, as they are compiled."""
        places = list(self.cases)
        return sorted(self.faults, key=lambda fault: places.index(fault.case))

    def compile_seconds(self) -> float:
        """Of all compilers together."""
        return sum(f.result().resources.seconds for f in as_completed([*self._sound.values(), *self._built.values()]) if not f.exception())

    def close(self) -> None:
        """Drop what has not begun."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def row_of(fault: Fault, kind: str, detail: str, seconds: float) -> dict[str, Any]:
    """A row of the results."""
    return {
        "name": fault.name, "file": fault.file, "case": fault.case, "breaks": fault.breaks, "caught": kind not in ("ok", "unsupported"),
        "kind": kind, "detail": detail, "seconds": round(seconds, 1),
    }  # fmt: skip


def report(suite: str, where: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is written: where and when it ran, and the rows."""
    return {
        "suite": suite, "where": where, "date": time.strftime("%Y-%m-%d"), "caught": sum(row["caught"] for row in rows),
        "planted": len(rows), "faults": list(rows),
    }  # fmt: skip


def chosen(suite: str, only: Sequence[str], skip: Sequence[str] = ()) -> list[Fault]:
    """The faults of a suite whose names begin with one of `only` (all by default), and with none of `skip`."""
    wanted = [fault for fault in SUITES[suite] if not only or fault.name.startswith(tuple(only))]
    return [fault for fault in wanted if not fault.name.startswith(tuple(skip))]


def text_of(result: dict[str, Any]) -> str:
    """A result as JSON with a line for each fault."""
    facts = json.dumps({name: value for name, value in result.items() if name != "faults"})
    faults = ",\n".join(map(json.dumps, result["faults"]))
    return f'{facts[:-1]}, "faults": [\n{faults}\n]}}\n'


def main(argv: Sequence[str] | None = None) -> int:
    """Run a suite; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__)
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at a time")
    parser.add_argument("--at-once", type=int, default=1, help="verifications at a time on the device")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds that a stage of a job may take")
    parser.add_argument("--only", nargs="*", default=(), help="beginnings of faults' names")
    parser.add_argument("--skip", nargs="*", default=(), help="beginnings of names to leave out: tilelang- where it is not installed")
    parser.add_argument("--compile", action="store_true", help="compile, and run nothing")
    parser.add_argument("--out", type=Path, help="where results go, as JSON")
    args = parser.parse_args(argv)
    faults = chosen(args.suite, args.only, args.skip)
    if not faults:
        parser.error(f"no fault of the suite begins with {' or '.join(args.only)}")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        suite = Suite(faults, CASES[args.suite], Path(folder), args.jobs, lambda line: print(line, flush=True))
        judges = Judges("cpu" if args.suite == "cpu" else "cuda", args.timeout, args.at_once)
        try:
            return compile_all(suite) if args.compile else run(suite, judges, args)
        finally:
            suite.close()
            judges.close()


def compile_all(suite: Suite) -> int:
    """Only compile."""
    for name, error in suite.broken().items():
        print(f"BROKEN   {name}: {error}")
    print(f"{suite.compile_seconds():.0f} s of compilers for {len(suite.faults)} faults and {len(suite.cases)} cases")
    return 3 if suite.broken() else 0


def run(suite: Suite, judges: Judges, args: argparse.Namespace) -> int:
    """Judge cases, then faults; write results."""
    unsound = suite.unsound(judges)
    if unsound:
        print(f"the suite is void: {'; '.join(f'{name} is {what} without a fault' for name, what in unsound.items())}")
        return 2
    rows = suite.rows(judges)
    broken = suite.broken()
    for name, error in broken.items():
        print(f"BROKEN   {name}: {error}")
    where = fingerprint("cpu" if args.suite == "cpu" else "sm90").get("name", "unknown")
    result = report(args.suite, where, rows)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text_of(result))
    print(f"{result['caught']} of {result['planted']} faults caught")
    return 3 if broken else 0 if result["caught"] == result["planted"] else 1


if __name__ == "__main__":
    sys.exit(main())
