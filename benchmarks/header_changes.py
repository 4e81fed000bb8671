"""Changes of device headers, each a list of patches, timed in turns with the headers as they are.

    python benchmarks/header_changes.py --change 1=docs/decisions/0027/1.patch
    python benchmarks/header_changes.py --arch cpu --case "k4v4 default 1x4096" --change NAME=PATCH,PATCH --change NAME=PATCH

A case is a spec, a schedule and workloads in the words of gpu_words.py; without `--case` there are those of docs/decisions/0027. A name
that ends in `.noexact` takes its cases with `exact_q: false`. Every changed module is verified as a build verifies it. Then all modules of
a case are timed at each workload, one round each in turns, idle-rested, and with `--sustained` under load, too. The ratio of a change is
the median over rounds of its time over that of the headers as they are in the same round; the row `again` is those headers a second
time, and tells the noise. Rows go to $OUT (or benchmarks/results) as header_changes.csv after every workload. Exits with 1 where a change
does not compile or is wrong.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import add_rounds, parser, processors
from benchmarks.compiling import attend_usage, build_sources, lower_all
from benchmarks.gpu_words import schedules_of, spec_of, workload_of
from benchmarks.output import write_rows
from kvgen import _resources
from kvgen.arch import Target
from kvgen.errors import KvgenError
from kvgen.lower.backends import get_backend
from kvgen.lower.schedule import Schedule
from kvgen.measure.finalists import interleave
from kvgen.measure.job import Job, TimingPolicy
from kvgen.measure.worker import Worker
from kvgen.spec import KernelSpec, Workload
from kvgen.toolchain import Artifact

BASE, AGAIN = "as it is", "again"
NOT_EXACT = ".noexact"
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
        spec = spec_of(spec_words, arch, [workload_of(word) for word in workloads.split(",")])
        backend = get_backend("cpu" if arch == "cpu" else "cuda")
        return cls(words, spec, schedules_of(schedule, backend, spec, arch)[0])

    def not_exact(self) -> Case:
        """The same with `exact_q: false`."""
        return replace(self, schedule=replace(self.schedule, launch=self.schedule.launch | {"exact_q": False}))


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
    command.add_argument("--arch", default="sm90")
    command.add_argument("--sustained", action="store_true", help="also under load")
    command.add_argument("--no-check", action="store_true", help="do not verify the changed modules")
    command.add_argument("--compile", action="store_true", help="print what the cases compile to with the present templates, as JSON")
    add_rounds(command)
    options = command.parse_args()
    cases = [Case.of(words, options.arch) for words in options.case or CASES]
    if options.compile:
        print(json.dumps([vars(module) for module in compiled(cases, options.arch)]))
        return 0
    changes = dict(change.split("=", 1) for change in options.change if "=" in change)
    if len(changes) != len(options.change) or {BASE, AGAIN} & set(changes):
        command.error(f"a change is NAME=PATCH[,PATCH], with a name of its own other than {BASE!r} and {AGAIN!r}")
    with tempfile.TemporaryDirectory(prefix="headers-") as folder:
        built = {BASE: compiled(cases, options.arch)}
        for name, patches in changes.items():
            built[name] = changed(Path(folder) / name, patches.split(","), options, name)
    bad = report(built, cases)
    with Worker() as worker:
        if not options.no_check:
            bad |= wrong(built, cases, options.arch, worker)
        good = {name: modules for name, modules in built.items() if name not in bad}
        measure(good, cases, options, worker)
    return 1 if bad else 0


def compiled(cases: Sequence[Case], arch: Target) -> list[Module]:
    """The module of every case, from the templates of this process."""
    sources = lower_all([(case.spec, case.schedule) for case in cases], arch, processors())
    right = [source for source in sources if not isinstance(source, KvgenError)]
    artifacts = iter(build_sources(right, processors()))
    return [Module("", 0, 0, str(source)) if isinstance(source, KvgenError) else _module(next(artifacts)) for source in sources]


def _module(built: Artifact | KvgenError) -> Module:
    return Module(str(built.path), *attend_usage(built)) if isinstance(built, Artifact) else Module("", 0, 0, str(built))


def changed(folder: Path, patches: Sequence[str], options: Any, name: str) -> list[Module]:
    """The modules over patched templates: this program in a process of its own, with a copy of the templates."""
    for part in ("templates", "search_spaces"):
        shutil.copytree(_resources.root() / part, folder / part)
    for patch in patches:
        subprocess.run(["git", "apply", str(Path(patch).resolve())], cwd=folder, check=True)
    words = [word for case in options.case or CASES for word in ("--case", not_exact_words(case) if name.endswith(NOT_EXACT) else case)]
    again = [sys.executable, __file__, "--compile", "--arch", options.arch, *words]
    done = subprocess.run(again, env=os.environ | {"KVGEN_DATA_DIR": str(folder)}, stdout=subprocess.PIPE, text=True, check=True)
    return [Module(**row) for row in json.loads(done.stdout)]


def not_exact_words(case: str) -> str:
    """A case's words, with `exact_q: false`."""
    spec, schedule, workloads = case.split()
    return f"{spec} {schedule}.noexact {workloads}"


def report(built: Mapping[str, Sequence[Module]], cases: Sequence[Case]) -> set[str]:
    """Print registers and spills; the changes of which something did not compile."""
    for number, case in enumerate(cases):
        told = [f"{name} {m.registers} registers, {m.spill_bytes} bytes spilled" for name, all_ in built.items() for m in [all_[number]]]
        print(f"{case.words}: {'; '.join(told)}", flush=True)
    bad = {name: module.error for name, modules in built.items() for module in modules if module.error}
    for name, error in bad.items():
        print(f"{name}: {error}", flush=True)
    return set(bad)


def job(case: Case, name: str, module: Module, arch: Target, workloads: Sequence[Workload]) -> Job:
    """Verify and time a module."""
    schedule = case.not_exact().schedule if name.endswith(NOT_EXACT) else case.schedule
    return Job(case.spec, schedule, arch, Path(module.path), tuple(workloads), timing=POLICY)


def wrong(built: Mapping[str, Sequence[Module]], cases: Sequence[Case], arch: Target, worker: Worker) -> set[str]:
    """Verify every changed module at its first workload; the changes of which one is wrong."""
    bad = set()
    for name, modules in built.items():
        for case, module in zip(cases, modules, strict=True):
            if name == BASE or module.error:
                continue
            outcome = worker.run(replace(job(case, name, module, arch, case.spec.workloads[:1]), timing=None))
            if not outcome.ok:
                print(f"{name}, {case.words}: {outcome.kind}: {outcome.detail}", flush=True)
                bad.add(name)
    return bad


def measure(built: Mapping[str, Sequence[Module]], cases: Sequence[Case], options: Any, worker: Worker) -> None:
    """Time all modules of a case in turns, at each of its workloads; rows after each."""
    from kvgen.cli.bench import facts

    known = {name: fact for name, fact in facts(options.arch, POLICY).items() if name not in ("call", "load")}
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(cases):
        for workload in loaded(case.spec.workloads, options.sustained):
            modules = {name: all_[number] for name, all_ in built.items()} | {AGAIN: built[BASE][number]}
            jobs = [replace(job(case, name, module, options.arch, [workload]), check=None) for name, module in modules.items()]
            outcomes = dict(zip(modules, interleave(jobs, options.rounds, worker=worker), strict=True))
            base = outcomes[BASE]
            for name, outcome in outcomes.items():
                row = {"change": name, "case": case.words.rsplit(" ", 1)[0], "workload": workload.key, "load": workload.load}
                row |= {"us": "", "ratio": "", "read_fraction": "", "note": outcome.detail}
                if outcome.ok and base.ok:
                    mine, plain = outcome.timings[0], base.timings[0]
                    row |= {"us": round(mine.us, 3), "read_fraction": round((mine.read_us or 0.0) / mine.us, 4)}
                    row["ratio"] = round(median(a / b for a, b in zip(mine.samples, plain.samples, strict=True)), 4)
                row |= {"registers": modules[name].registers, "spill_bytes": modules[name].spill_bytes}
                rows.append(row)
                print(*row.values(), flush=True)
            write_rows("header_changes", rows, known)


def loaded(workloads: Sequence[Workload], sustained: bool) -> Iterator[Workload]:
    """The workloads idle-rested, and under load."""
    for workload in workloads:
        yield workload
        if sustained:
            yield replace(workload, load="sustained")


if __name__ == "__main__":
    sys.exit(main())
