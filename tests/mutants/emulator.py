"""Plant the CUDA faults in the headers that the emulator compiles for the CPU, and see what the fp64 reference makes of each.

    python -m tests.mutants.emulator [--jobs N] [--only NAME ...] [--out FILE.json]

Each fault has a process of its own: some hang, some write where they must not. What the emulator does not know (the host's calls,
TileLang) is not reached, and said so. Exit codes are those of `tests.mutants.run`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvgen.toolchain.compilers import cpu_name
from tests.mutants.emulated_lives import CASES, PACKED, Wrong, live
from tests.mutants.fault import Fault, planted
from tests.mutants.plant import ROOT
from tests.mutants.run import chosen, report, row_of, text_of

PACKING = ("pack/", "host/args.cuh", "format/places.cuh")
PLANNING = ("schedule/plan_kernel.cuh", "schedule/plan.hpp", "schedule/row.hpp", "schedule/divisor.hpp")
CONCURRENT = ("splits-counter-batch",)
"""Faults that show only where CTAs run at the same time: the emulator runs one after the other."""
TIMEOUT_S = 300.0
SOUND = "sound"


def emulated_case(fault: Fault) -> tuple[str, str] | None:
    """The kind and the name of the emulated case that reaches a fault, or None."""
    if not fault.file.startswith(("templates/cuda/", "templates/common/")) or fault.name in CONCURRENT:
        return None
    header = fault.file.partition("include/kvgen/")[2]
    if header in PLANNING:
        return "plan", "all"
    kind, cases = ("pack", PACKED) if header.startswith(PACKING) else ("attend", CASES)
    return (kind, fault.case) if fault.case in cases else None


def faulty_templates(fault: Fault | None, folder: Path) -> Path:
    """A copy of the headers with the fault."""
    for part in ("cuda", "common"):
        shutil.copytree(ROOT / "templates" / part, folder / part)
    if fault is not None:
        (folder.parent / fault.file).write_text(planted(fault, (ROOT / fault.file).read_text()))
    return folder


def judge_here(name: str) -> dict[str, Any]:
    """In a process of its own: what is wrong with a fault, or with a case that has none (`sound:KIND:NAME`)."""
    with tempfile.TemporaryDirectory(prefix="emulated-") as scratch:
        fault = None if name.startswith(f"{SOUND}:") else next(f for f in chosen("cuda", ()) if f.name == name)
        case = tuple(name.split(":")[1:]) if fault is None else emulated_case(fault)
        assert case is not None
        kind, case_name = case
        templates = faulty_templates(fault, Path(scratch) / "templates")
        try:
            live(kind, case_name, templates, Path(scratch) / "built")
        except Wrong as error:
            return {"kind": "wrong", "detail": str(error)}
        except subprocess.CalledProcessError:
            return {"kind": "compile_error", "detail": "g++ refuses it"}
    return {"kind": "ok", "detail": ""}


def judge(name: str) -> dict[str, Any]:
    """What a process of its own says, or its end means."""
    command = [sys.executable, "-m", "tests.mutants.emulator", "--judge", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return {"kind": "timeout", "detail": f"it did not finish within {TIMEOUT_S:g} s"}
    if done.returncode < 0:
        return {"kind": "crash", "detail": f"it died of signal {signal.Signals(-done.returncode).name}"}
    if done.returncode:
        return {"kind": "broken", "detail": done.stderr[-1500:]}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def unsound(faults: Sequence[Fault], pool: ThreadPoolExecutor) -> list[str]:
    """Emulated cases that fail without a fault."""
    needed = sorted({":".join(case) for fault in faults if (case := emulated_case(fault)) is not None})
    found = []
    for name, answer in zip(needed, pool.map(lambda name: judge(f"{SOUND}:{name}"), needed), strict=True):
        print(f"sound    {name}: {answer['kind']} {answer['detail']}", flush=True)
        if answer["kind"] != "ok":
            found.append(name)
    return found


def row(fault: Fault) -> dict[str, Any]:
    """A fault's row; `kind` is `not reached` where no emulated variant has the line."""
    answer = {"kind": "not reached", "detail": ""} if emulated_case(fault) is None else judge(fault.name)
    made = row_of(fault, answer["kind"], answer["detail"], 0.0)
    if answer["kind"] in ("not reached", "broken", "compile_error"):
        made["caught"] = False
    word = "caught" if made["caught"] else "SURVIVED" if answer["kind"] == "ok" else ""
    print(f"{word:8} {fault.name}: {answer['kind']} {answer['detail']}", flush=True)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite in the emulator; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.emulator", description=__doc__)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--out", type=Path)
    parser.add_argument("--judge", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.judge:
        print(json.dumps(judge_here(args.judge)))
        return 0
    faults = chosen("cuda", args.only)
    with ThreadPoolExecutor(args.jobs) as pool:
        if void := unsound(faults, pool):
            print(f"the suite is void: {', '.join(void)} fails without a fault")
            return 2
        rows = list(pool.map(row, faults))
    reached = [found for found in rows if found["kind"] != "not reached"]
    result = report("emulator", cpu_name(), rows)
    result["planted"] = len(reached)
    if args.out:
        args.out.write_text(text_of(result))
    print(f"{result['caught']} of {len(reached)} faults caught, {len(rows) - len(reached)} not reached")
    return 3 if any(found["kind"] in ("broken", "compile_error") for found in rows) else int(result["caught"] < len(reached))


if __name__ == "__main__":
    sys.exit(main())
