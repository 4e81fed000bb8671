"""Plant faults in the headers one by one, and see whether verification alone catches each.

    python -m tests.mutants cpu|cuda [--jobs N] [--workers N] [--only NAME ...] [--out FILE.json]

`faults.yaml` has a fault of each kind; its text is found whatever the white space around its tokens. Every case must pass without a
fault first: else the exit code is 2. It is 0 where all faults were caught, 1 where some survive, 3 where one could not be planted or does
not compile. `--compile` stops before anything runs. `cuda --emulate` needs no GPU: it judges the faults of linear layers by the emulator.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import yaml

from kvgen.lower.template import reached_headers
from kvgen.measure.measurement import Job, Measurement, TimingPolicy, fingerprint
from kvgen.measure.worker import Worker
from kvgen.spec import LinearSpec
from kvgen.toolchain import Artifact, ArtifactCache, build
from kvgen.verify import CheckPolicy
from tests.mutants import emulated
from tests.mutants.cases import CASES, Case

ROOT = Path(__file__).resolve().parents[2]
QUICK = TimingPolicy(seconds=0.0, warmup_seconds=0.0, samples=1, cold_bytes=1)
"""Times say nothing here, but a launch is verified at the workloads that it is timed at."""


@dataclass(frozen=True)
class Fault:
    """`find` occurs once in `file`, a path from the root of the project; `case` is a variant that executes it."""

    name: str
    file: str
    case: str
    breaks: str
    find: str
    replace: str

    def planted(self) -> str:
        """The file's text with the fault. Raises ValueError where its text is not there, or not once."""
        text = (ROOT / self.file).read_text()
        pattern = r"\s*".join(map(re.escape, re.findall(r"\w+|\S", self.find)))
        changed, count = re.subn(pattern, lambda _: self.replace, text)
        if count != 1:
            raise ValueError(f"its text occurs {count} times in {self.file}")
        return changed


def faults_of(suite: str) -> list[Fault]:
    """The faults of a suite, by case, so that a worker's reference results serve the next."""
    files = yaml.safe_load((Path(__file__).parent / "faults.yaml").read_text())[suite]
    found = [Fault(file=file, **fault) for file, faults in files.items() for fault in faults]
    return sorted(found, key=lambda fault: list(CASES[suite]).index(fault.case))


def compiled(case: Case, fault: Fault | None, folder: Path) -> Artifact:
    """The case's module, with the fault in a header that is found before the real one.

    Raises CompileError, and ValueError where the fault cannot be planted.
    """
    source = case.source
    if fault is not None:
        placed = folder / fault.name / fault.file.partition("/include/")[2]
        placed.parent.mkdir(parents=True, exist_ok=True)
        placed.write_text(fault.planted())
        include = (folder / fault.name, *source.include)
        headers = reached_headers(source.text, include)
        if placed not in headers:
            raise ValueError(f"{case.name} does not include {fault.file}")
        source = replace(source, include=include, headers=headers)
    return build(source, ArtifactCache(folder / "cache"))


def judged(worker: Worker, case: Case, artifact: Path, timeout_s: float) -> Measurement:
    """What a worker says of a variant: the first answer that is not `ok`, or the last."""
    found = Measurement("ok")
    for number, workload in enumerate(case.spec.workloads or (None,)):
        worker.start("cpu" if case.target == "cpu" else "cuda")
        job = Job(case.spec, case.schedule, case.target, artifact, workload, CheckPolicy(workloads_only=number > 0), QUICK)
        found = worker.run(job, timeout_s)
        if not found.ok:
            break
    return found


def answers(todo: dict[str, tuple[Case, Future[Artifact]]], timeout_s: float, workers: int) -> dict[str, Measurement]:
    """What comes of each, as it is compiled; `compile_error` where it cannot be planted or compiled. Those of a case share a worker."""

    def of(case: Case) -> dict[str, Measurement]:
        worker, found = Worker(), dict[str, Measurement]()
        try:
            for name, (other, building) in todo.items():
                if other is not case:
                    continue
                error = building.exception()
                if error is not None:
                    found[name] = Measurement("compile_error", str(error)[:2000])
                else:
                    found[name] = judged(worker, case, building.result().path, timeout_s)
                print(f"{found[name].kind:14} {name} ({case.name}): {found[name].detail}", flush=True)
        finally:
            worker.close()
        return found

    cases = {id(case): case for case, _ in todo.values()}
    with ThreadPoolExecutor(workers) as pool:
        return {name: answer for found in pool.map(of, cases.values()) for name, answer in found.items()}


def emulated_answers(todo: dict[str, tuple[Case, Future[Path]]], timeout_s: float) -> dict[str, Measurement]:
    """As `answers`, by the emulator."""
    found = {}
    for name, (case, building) in todo.items():
        error = building.exception()
        found[name] = Measurement("compile_error", str(error)) if error else emulated.judged(case, building.result(), timeout_s)
        print(f"{found[name].kind:14} {name} ({case.name}): {found[name].detail}", flush=True)
    return found


def emulate(
    faults: list[Fault], cases: dict[str, Case], folder: Path, pool: ThreadPoolExecutor, timeout_s: float
) -> dict[str, Measurement]:
    """What comes of the faults by the emulator; nothing where a case fails without a fault."""

    def library(case: Case, fault: Fault | None) -> Path:
        planted = {} if fault is None else {fault.file.partition("/include/")[2]: fault.planted()}
        return emulated.compiled(case, planted, folder / (fault.name if fault else f"case-{case.name}"))

    sound = {name: (case, pool.submit(library, case, None)) for name, case in cases.items()}
    faulty = {fault.name: (cases[fault.case], pool.submit(library, cases[fault.case], fault)) for fault in faults}
    if any(not answer.ok for answer in emulated_answers(sound, timeout_s).values()):
        return {}
    return emulated_answers(faulty, timeout_s)


def main() -> int:
    """Run a suite; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("suite", choices=sorted(CASES))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at a time")
    parser.add_argument("--workers", type=int, default=1, help="cases that run at a time")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a stage of a job may take")
    parser.add_argument("--only", nargs="*", default=[""], help="beginnings of faults' names")
    parser.add_argument("--compile", action="store_true", help="compile, and run nothing")
    parser.add_argument("--out", type=Path, help="where results go, as JSON")
    parser.add_argument("--emulate", action="store_true", help="of linear layers on CUDA: by the emulator")
    args = parser.parse_args()
    faults = [fault for fault in faults_of(args.suite) if fault.name.startswith(tuple(args.only))]
    if args.emulate:
        cases = {name: case for name, case in CASES["cuda"].items() if isinstance(case.spec, LinearSpec)}
        faults = [fault for fault in faults if fault.case in cases and not fault.file.endswith(emulated.OTHERS)]
    cases = {fault.case: CASES[args.suite][fault.case] for fault in faults}
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch, ThreadPoolExecutor(args.jobs) as pool:
        folder = Path(scratch)
        if args.emulate:
            return reported(emulate(faults, cases, folder, pool, args.timeout), faults, args)
        sound = {name: (case, pool.submit(compiled, case, None, folder)) for name, case in cases.items()}
        faulty = {fault.name: (cases[fault.case], pool.submit(compiled, cases[fault.case], fault, folder)) for fault in faults}
        if args.compile:
            errors = {name: building.exception() for name, (_, building) in {**sound, **faulty}.items()}
            print(*(f"{name}: {error}" for name, error in errors.items() if error is not None), sep="\n")
            return 3 if any(errors.values()) else 0
        if any(not answer.ok for answer in answers(sound, args.timeout, args.workers).values()):
            return reported({}, faults, args)
        return reported(answers(faulty, args.timeout, args.workers), faults, args)


def reported(found: dict[str, Measurement], faults: list[Fault], args: argparse.Namespace) -> int:
    """The exit code, after what came of each fault is told."""
    if not found:
        print("the suite is void: a case fails without a fault")
        return 2
    survivors = [name for name, answer in found.items() if answer.kind in ("ok", "unsupported")]
    broken = [name for name, answer in found.items() if answer.kind == "compile_error"]
    caught = len(found) - len(survivors) - len(broken)
    print(f"{caught} of {len(found)} faults caught; survivors: {survivors}; broken: {broken}")
    if args.out:
        rows = [{**asdict(fault), "kind": found[fault.name].kind, "detail": found[fault.name].detail} for fault in faults]
        head = {"machine": fingerprint("cpu" if args.suite == "cpu" else "sm90").get("name"), "date": time.strftime("%Y-%m-%d")}
        kept = [{key: row[key] for key in ("name", "file", "case", "breaks", "kind", "detail")} for row in rows]
        args.out.write_text(json.dumps({**head, "caught": caught, "planted": len(found)})[:-1] + ', "faults": [\n')
        with args.out.open("a") as file:
            file.write(",\n".join(map(json.dumps, kept)) + "\n]}\n")
    return 3 if broken else 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
