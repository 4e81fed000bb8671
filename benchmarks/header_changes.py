"""Changes of device headers, each a list of patches, timed in turns with the headers as they are.

    python benchmarks/header_changes.py --change pinned=pinned.patch --change both=pinned.patch,order.patch
    python benchmarks/header_changes.py --arch cpu --case "k4v4 default 1x4096" --change NAME=PATCH,PATCH --change NAME=PATCH

A case is a spec and a schedule in the words of gpu_words.py, and workloads by their keys (48x300-24576 has unequal lengths); without
`--case` there are those of docs/decisions/0027. Of a patch, only what it changes below templates and search_spaces counts. A change whose
name ends in `.noexact` takes its cases with `exact_q: false`. Every changed module is verified as a build verifies it, at its first
workload. Then all modules of a case are timed at each workload, one round each in turns, idle-rested, and with `--sustained` under load,
too. The ratio of a change is the median over rounds of its time over that of the headers as they are in the same round; the row `again`
is those headers a second time, and tells the noise. Under load a row has the GPU's power and clock (`watts`, `clock_mhz`), those of the
last round. With `--cold 180,1440` a case is timed with as many copies of its inputs, which calls use in turn, as have so many MiB together
(whole copies, at most 64), once for each number; without it as builds do. Rows go to $OUT (or benchmarks/results) as header_changes.csv
after every timing; none is begun after `--budget` seconds.
Exits with 1 where a change does not compile, is wrong, or could not be timed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import add_rounds, parser, processors
from benchmarks.compiling import attend_usage, build_sources, lower_all
from benchmarks.gpu_words import schedules_of, spec_of
from benchmarks.output import write_rows
from kvgen import _resources
from kvgen.arch import Target
from kvgen.errors import KvgenError
from kvgen.lower.backends import get_backend
from kvgen.lower.schedule import Params, Schedule
from kvgen.measure.finalists import interleave
from kvgen.measure.job import Job, Outcome, TimingPolicy
from kvgen.measure.worker import Worker
from kvgen.spec import KernelSpec, Workload
from kvgen.spec.traffic import parse
from kvgen.toolchain import Artifact

BASE, AGAIN = "as it is", "again"
NOT_EXACT = ".noexact"
Place = tuple[str, int]
"""A change and the number of a case."""
POLICY = TimingPolicy(seconds=0.1, samples=15, read=True)
CASES = (
    "k4v4 w8u1d2.cl2 8x32768,32x8192,128x8192,64x4096", "k8v8 w8u2d1.cl2 8x32768,32x8192,128x8192", "k2v2 w12u4d1 8x32768,32x8192,64x4096",
    "k4v4 w4u4d1c2 8x32768,64x4096", "k8v4 w8u1d2 8x32768", "k4v4:h64/8:d64 w6u4d1c2 16x16384,64x4096", "k4v4:d80 w12u4d1 8x32768",
    "k4v4:d112 w8u4d1 8x32768", "k2v2:boost1/8:sink32:local128:page128 w6u4d1c2 8x32768",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A spec for some workloads, and a schedule."""

    words: str
    spec: KernelSpec
    schedule: Schedule

    @classmethod
    def of(cls, words: str, arch: Target) -> Case:
        """What the words mean. Raises ValueError."""
        try:
            spec_words, schedule, workloads = words.split()
        except ValueError:
            raise ValueError(f"a case is a spec, a schedule and workloads, like {CASES[1]!r}, not {words!r}") from None
        spec = spec_of(spec_words, arch, [parse(word) for word in workloads.split(",")])
        backend = get_backend("cpu" if arch == "cpu" else "cuda")
        return cls(words, spec, schedules_of(schedule, backend, spec, arch)[0])

    def under(self, change: str) -> Case:
        """The case as a change takes it."""
        if not change.endswith(NOT_EXACT):
            return self
        return replace(self, schedule=replace(self.schedule, launch=Params(self.schedule.launch, exact_q=False)))


@dataclass(frozen=True)
class Module:
    """A compiled case, or why there is none."""

    path: str
    registers: int
    spill_bytes: int
    error: str = ""


def main() -> int:
    """Patch, compile, verify, time."""
    command = parser(__doc__)
    command.add_argument("--change", action="append", default=[], metavar="NAME=PATCH[,PATCH]")
    command.add_argument("--case", action="append", metavar="'SPEC SCHEDULE WORKLOADS'")
    command.add_argument("--arch", default="sm90", choices=get_args(Target))
    command.add_argument("--sustained", action="store_true", help="also under load")
    command.add_argument("--cold", metavar="MIB,…", default="", help="MiB of inputs to time with, one after the other")
    command.add_argument("--no-check", action="store_true", help="do not verify the changed modules")
    command.add_argument("--budget", type=float, default=inf, help="seconds, after which no workload is begun")
    command.add_argument(
        "--compile", metavar="NAME", help="print what the cases of a change compile to with the present templates, as JSON"
    )
    add_rounds(command)
    options = command.parse_args()
    started = time.monotonic()
    try:
        cases = [Case.of(words, options.arch) for words in options.case or CASES]
        options.cold = colds(options.cold)
    except (ValueError, KvgenError) as error:
        command.error(str(error))
    if options.compile:
        print(json.dumps([vars(module) for module in compiled([case.under(options.compile) for case in cases], options.arch)]))
        return 0
    changes = dict(change.split("=", 1) for change in options.change if "=" in change)
    if len(changes) != len(options.change) or {BASE, AGAIN} & set(changes):
        command.error(f"a change is NAME=PATCH[,PATCH], with a name of its own other than {BASE!r} and {AGAIN!r}")
    with tempfile.TemporaryDirectory(prefix="headers-") as folder:
        try:
            folders = {name: patched(Path(folder) / str(number), changes[name].split(",")) for number, name in enumerate(changes)}
        except (OSError, ValueError) as error:
            command.error(str(error))
        built = {BASE: compiled(cases, options.arch)}
        with ThreadPoolExecutor() as pool:
            built |= zip(changes, pool.map(lambda name: elsewhere(name, folders[name], options), changes), strict=True)
    bad = report(built, cases)
    with Worker() as worker:
        if not options.no_check:
            bad |= wrong(built, cases, bad, options.arch, worker)
        bad |= measure(built, cases, bad, options, worker, started + options.budget)
    return 1 if bad else 0


def compiled(cases: Sequence[Case], arch: Target) -> list[Module]:
    """The module of every case, from the templates of this process."""
    sources = lower_all([(case.spec, case.schedule) for case in cases], arch, processors())
    right = [source for source in sources if not isinstance(source, KvgenError)]
    artifacts = iter(build_sources(right, processors()))
    return [Module("", 0, 0, str(source)) if isinstance(source, KvgenError) else _module(next(artifacts)) for source in sources]


def _module(built: Artifact | KvgenError) -> Module:
    return Module(str(built.path), *attend_usage(built)) if isinstance(built, Artifact) else Module("", 0, 0, str(built))


def patched(folder: Path, patches: Sequence[str]) -> Path:
    """A copy of the templates and search spaces with the patches. Raises ValueError for one that does not apply, OSError for none."""
    parts = ("templates", "search_spaces")
    for part in parts:
        shutil.copytree(_resources.root() / part, folder / part)
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}  # inside a repository git would skip files that are not its own
    for patch in patches:
        command = ["git", "apply", *(f"--include={part}/*" for part in parts), str(Path(patch).resolve(strict=True))]
        done = subprocess.run(command, cwd=folder, env=outside, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"{patch} does not apply: {done.stderr.strip()}")
    return folder


def elsewhere(name: str, folder: Path, options: Any) -> list[Module]:
    """The modules of a change over its own templates: this program in another process."""
    words = [word for case in options.case or CASES for word in ("--case", case)]
    again = [sys.executable, __file__, "--compile", name, "--arch", options.arch, *words]
    done = subprocess.run(again, env=os.environ | {"KVGEN_DATA_DIR": str(folder)}, stdout=subprocess.PIPE, text=True, check=True)
    return [Module(**row) for row in json.loads(done.stdout)]


def report(built: Mapping[str, Sequence[Module]], cases: Sequence[Case]) -> set[Place]:
    """Print registers and spills; what did not compile."""
    bad = set()
    for number, case in enumerate(cases):
        for name, modules in built.items():
            module = modules[number]
            told = module.error or f"{module.registers} registers, {module.spill_bytes} bytes spilled"
            print(f"{case.words}, {name}: {told}", flush=True)
            if module.error:
                bad.add((name, number))
    return bad


def job(case: Case, name: str, module: Module, arch: Target, workload: Workload, cold: int | None = None) -> Job:
    """Verify and time a module; `cold` as in TimingPolicy."""
    return Job(case.spec, case.under(name).schedule, arch, Path(module.path), (workload,), timing=replace(POLICY, cold_bytes=cold))


def wrong(built: Mapping[str, Sequence[Module]], cases: Sequence[Case], bad: Set[Place], arch: Target, worker: Worker) -> set[Place]:
    """Verify every changed module; those that are wrong."""
    found = set()
    for name, modules in built.items():
        for number, (case, module) in enumerate(zip(cases, modules, strict=True)):
            if name == BASE or (name, number) in bad:
                continue
            outcome = worker.run(replace(job(case, name, module, arch, case.spec.workloads[0]), timing=None))
            if not outcome.ok:
                print(f"{name}, {case.words}: {outcome.kind}: {outcome.detail}", flush=True)
                found.add((name, number))
    return found


def measure(
    built: Mapping[str, Sequence[Module]], cases: Sequence[Case], bad: Set[Place], options: Any, worker: Worker, until: float
) -> set[Place]:
    """Time the modules of a case in turns, at each of its workloads; rows after each. Those that could not be timed."""
    from kvgen.cli.bench import facts

    known = {name: fact for name, fact in facts(options.arch, POLICY).items() if name not in ("call", "load")}
    rows: list[dict[str, Any]] = []
    failed = set()
    for number, case in enumerate(cases):
        for workload, cold in product(loaded(case.spec.workloads, options.sustained), options.cold):
            if time.monotonic() > until or (BASE, number) in bad:
                break
            modules = {name: all_[number] for name, all_ in built.items() if (name, number) not in bad} | {AGAIN: built[BASE][number]}
            jobs = [replace(job(case, name, module, options.arch, workload, cold), check=None) for name, module in modules.items()]
            outcomes = dict(zip(modules, interleave(jobs, options.rounds, worker=worker), strict=True))
            failed |= {(name, number) for name, outcome in outcomes.items() if not outcome.ok}
            for name, outcome in outcomes.items():
                row = {"change": name, "case": case.words.rsplit(" ", 1)[0], "workload": workload.key, "load": workload.load}
                row["cold_mib"] = "" if cold is None else str(cold >> 20)
                rows.append(
                    row | timed(outcome, outcomes[BASE]) | {key: getattr(modules[name], key) for key in ("registers", "spill_bytes")}
                )
                print(*rows[-1].values(), flush=True)
            write_rows("header_changes", rows, known)
    return failed


def timed(outcome: Outcome, base: Outcome) -> dict[str, Any]:
    """Time, ratio to the headers as they are, read fraction, power and clock; empty where there is none."""
    row: dict[str, Any] = {"us": "", "ratio": "", "read_fraction": "", "watts": "", "clock_mhz": "", "note": outcome.detail}
    if outcome.ok:
        mine = outcome.timings[0]
        row |= {"us": round(mine.us, 3), "read_fraction": round((mine.read_us or 0.0) / mine.us, 4)}
        row |= {name: known for name in ("watts", "clock_mhz") if (known := getattr(mine, name)) is not None}
        if base.ok:
            row["ratio"] = round(median(a / b for a, b in zip(mine.samples, base.timings[0].samples, strict=True)), 4)
    return row


def loaded(workloads: Sequence[Workload], sustained: bool) -> Iterator[Workload]:
    """The workloads idle-rested, and under load."""
    for workload in workloads:
        yield workload
        if sustained:
            yield replace(workload, load="sustained")


def colds(words: str) -> list[int | None]:
    """Bytes that are touched between two uses of an input, of words in MiB; without words as in builds. Raises ValueError."""
    if not words:
        return [None]
    sizes = [int(word) << 20 for word in words.split(",")]
    if min(sizes) <= 0:
        raise ValueError(f"inputs have more than no bytes, not {words} MiB")
    return sizes


if __name__ == "__main__":
    sys.exit(main())
