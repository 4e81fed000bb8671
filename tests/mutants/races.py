"""Plant races and misaligned accesses in the CUDA headers, and see whether the emulator's checks report each.

    python -m tests.mutants.races [--jobs N] [--only NAME ...]

Each fault has a process of its own, which runs a few calls of its case with the checks on. Exit code 1 where a fault is not reported, 2
where something is reported without one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

from kvgen.format.layout import packed_layout
from kvgen.format.residual import residual_rows
from kvgen.verify.quantize import torch_dtype
from tests.lives.life import Wrong as LifeWrong
from tests.lives.packing import PackLife
from tests.mutants.emulated_lives import CASES, PACKED, PLANS, Wrong, attend, decode, headers_of
from tests.mutants.emulator import PACKING, PLANNING, faulty_templates
from tests.mutants.fault import Fault
from tests.mutants.faults_races import FAULTS
from tests.mutants.plant import ROOT
from tests.unit.lower_cuda import emulate, race_checks
from tests.unit.lower_cuda.emulate_attend import Emulated, launch
from tests.unit.lower_cuda.emulate_plan import Planner, differences

TIMEOUT_S = 600.0
SOUND = "sound"
ONE_LONG = (1100,)
"""Its heads are split, on 30 multiprocessors."""


def case_of(fault: Fault) -> tuple[str, str]:
    """The kind and the name of the case that reaches a fault."""
    header = fault.file.partition("include/kvgen/")[2]
    return "plan" if header in PLANNING else "pack" if header.startswith(PACKING) else "attend", fault.case


def few_calls(kind: str, name: str, folder: Path) -> str:
    """What differs from the reference in a few calls of a case, or nothing."""
    try:
        {"plan": _plan, "pack": _pack, "attend": _attend}[kind](name, folder)
    except (Wrong, LifeWrong) as error:
        return str(error)
    return ""


def _attend(name: str, folder: Path) -> None:
    case = CASES[name]
    built = Emulated(case.spec, case.block, launch(**case.launch), folder)
    attend(built, *case.attends[0])
    attend(built, ONE_LONG, 30)
    for lengths, processors in case.decodes:
        for planned in (False, True):
            decode(built, lengths, processors, planned, backwards=planned)


def _pack(name: str, folder: Path) -> None:
    case = PACKED[name]
    layout = packed_layout(case.spec, case.block, "mma")
    rows = residual_rows(case.spec, case.block)
    packer = emulate.Emulated(layout, torch_dtype(case.spec.attention.dtype), folder, rows)
    for seed in range(3):
        PackLife(packer, case.spec, layout, Random(seed)).live()


def _plan(_: str, folder: Path) -> None:
    planner = Planner.emulated(folder)
    for shape, lengths, limit, skip_empty in PLANS[:2] + PLANS[6:]:
        if found := differences(planner, shape, lengths, limit, skip_empty):
            raise Wrong(", ".join(found))


def judge_here(name: str) -> dict[str, Any]:
    """In a process of its own: what the reference and the checks find in a fault, or in a case that has none (`sound:KIND:NAME`)."""
    fault = None if name.startswith(f"{SOUND}:") else next(fault for fault in FAULTS if fault.name == name)
    kind, case = name.split(":")[1:] if fault is None else case_of(fault)
    with tempfile.TemporaryDirectory(prefix="races-") as scratch, race_checks.enabled():
        with headers_of(faulty_templates(fault, Path(scratch) / "templates")):
            wrong = few_calls(kind, case, Path(scratch) / "built")
        return {"wrong": wrong, "reports": race_checks.reports(Path(scratch))}


def judge(name: str) -> dict[str, Any]:
    """What a process of its own says; a hang or a crash is no report."""
    command = [sys.executable, "-m", "tests.mutants.races", "--judge", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return {"wrong": f"it did not finish within {TIMEOUT_S:g} s", "reports": []}
    if done.returncode:
        return {"wrong": f"exit code {done.returncode}: {done.stderr[-300:]}", "reports": []}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.races", description=__doc__)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--judge", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.judge:
        print(json.dumps(judge_here(args.judge)))
        return 0
    if why := race_checks.unsupported():
        parser.error(why)
    faults = [fault for fault in FAULTS if not args.only or fault.name.startswith(tuple(args.only))]
    with ThreadPoolExecutor(args.jobs) as pool:
        needed = sorted({":".join((SOUND, *case_of(fault))) for fault in faults})
        for name, answer in zip(needed, pool.map(judge, needed), strict=True):
            print(f"sound  {name}: {answer}", flush=True)
            if answer["wrong"] or answer["reports"]:
                print(f"the suite is void: {name} has {answer}")
                return 2
        caught = unseen = 0
        for fault, answer in zip(faults, pool.map(judge, [fault.name for fault in faults]), strict=True):
            caught, unseen = caught + bool(answer["reports"]), unseen + bool(answer["reports"] and not answer["wrong"])
            found = answer["reports"][0] if answer["reports"] else "-"
            print(f"{'caught' if answer['reports'] else 'MISSED'} {fault.name}: {answer['wrong'] or 'right outputs'}; {found}", flush=True)
    print(f"{caught} of {len(faults)} faults are reported; {unseen} of these give right outputs")
    return int(caught < len(faults))


if __name__ == "__main__":
    sys.exit(main())
