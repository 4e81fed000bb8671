"""Sweep of GPU schedules: compile in parallel, verify, time against the read of the same bytes, print a table.

    python benchmarks/gpu_decode.py k4v4,k2v2 8x32768,1x131072 w8u4d1,w8u4d1.cl8 [--decode] [--ptx sm80]

Words are those of gpu_words.py. `flush_us` is what packing a block, with the choice of boosted channels, adds to a decode step on average
over the steps that fill one. Results also go to $OUT (or benchmarks/results) as gpu_decode.json.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import add_sweep, parser
from benchmarks.compiling import attend_usage, build_sources, lower_all
from benchmarks.gpu_words import lengths_of, schedule_word, schedules_of, spec_of, workload_of
from benchmarks.output import write_json
from kvgen.errors import CompileError, KvgenError
from kvgen.lower.backends import get_backend
from kvgen.lower.schedule import Schedule
from kvgen.measure import read_roofline
from kvgen.toolchain import Artifact

Row = dict[str, Any]
SILENCE_S = 90.0


def arguments() -> argparse.Namespace:
    """The command line."""
    command = parser(__doc__)
    command.add_argument("specs")
    command.add_argument("workloads")
    command.add_argument("schedules", nargs="?", default="default")
    command.add_argument("--decode", action="store_true", help="also decode, flush included, and what the flush adds per step")
    command.add_argument("--backend", default="cuda")
    command.add_argument("--ptx", choices=("sm80", "sm89"), help="lower for an older target, run its PTX")
    add_sweep(command)
    command.add_argument("--name", default="gpu_decode")
    return command.parse_args()


def main() -> int:
    """Compile, measure, print."""
    options = arguments()
    target = options.ptx or "sm90"
    backend = get_backend(options.backend)
    workloads = [workload_of(word) for word in options.workloads.split(",")]
    points: list[tuple[Any, Schedule]] = []
    for words in options.specs.split(","):
        spec = spec_of(words, target, workloads)
        for schedules in options.schedules.split(","):
            points += [(spec, schedule) for schedule in schedules_of(schedules, backend, spec, target)]
    tasks = compile_all(backend, points, target, options)
    rows: list[Row] = []
    for task in tasks:
        rows += measure(task)
    write_json(options.name, rows)
    return 0 if rows and all(row["us"] for row in rows) else 1


def compile_all(backend: Any, points: list[tuple[Any, Schedule]], target: Any, options: argparse.Namespace) -> list[Row]:
    """One task per spec and layout, with the modules that compiled."""
    started = time.monotonic()
    read = read_roofline.artifact("sm90")
    kept = []
    for spec, schedule in dict.fromkeys(points):
        problems = backend.space(spec, target).check(schedule)
        if problems:
            print(f"- {spec.name} {schedule_word(schedule)}: {problems[0]}", flush=True)
            continue
        kept.append((spec, schedule))
    sources = []
    for source in lower_all(kept, target, options.workers):
        if isinstance(source, KvgenError):
            raise source
        sources.append(source)
    tasks: dict[tuple[str, str], Row] = {}
    found = build_sources(sources, options.workers, ptx_only=options.ptx is not None)
    for (spec, schedule), artifact in zip(kept, found, strict=True):
        word = schedule_word(schedule)
        if not isinstance(artifact, Artifact):
            log = artifact.log[-1500:] if isinstance(artifact, CompileError) else ""
            print(f"- {spec.name} {word}: {artifact} {log}", flush=True)
            continue
        registers, spill = attend_usage(artifact)
        task = tasks.setdefault(
            (spec.name, str(schedule.layout)),
            {"spec": spec.to_json(), "modules": [], "workloads": list(range(len(spec.workloads))), "skip": [],
             "read": str(read.path), "lengths": [lengths_of(word) for word in options.workloads.split(",")],
             "decode": options.decode, "rounds": options.rounds, "logit": options.logit, "target": target},
        )  # fmt: skip
        task["modules"].append(
            {"schedule": word, "path": str(artifact.path), "json": schedule.to_json(),
             "registers": registers, "spill": spill}
        )  # fmt: skip
    print(f"compiled {len(found)} modules in {time.monotonic() - started:.0f} s", flush=True)
    return list(tasks.values())


def measure(task: Row) -> list[Row]:
    """Results of a task; a child that dies or hangs is started again without the schedule that it was at."""
    spec = task["spec"]
    modules = {m["schedule"]: m for m in task["modules"]}
    print(f"{spec['name']}: µs, fraction of the read, relative L2", flush=True)
    rows: list[Row] = []
    done: set[tuple[str, int]] = set()
    for _ in range(len(modules) * len(task["workloads"]) + 1):
        at, fault = child(task, lambda line: rows.append(_row(line, spec, modules, task, done)))
        if fault is None:
            break
        print(f"  {at}: {fault}", flush=True)
        if at is None or at[0] == "timing":
            break
        task["skip"] = [*task["skip"], list(at)]
        finished = {number for _, number in done}
        task["workloads"] = [number for number in task["workloads"] if number not in finished]
    return rows


def _row(line: Row, spec: Row, modules: dict[str, Row], task: Row, done: set[tuple[str, int]]) -> Row:
    work, module = spec["workloads"][line["workload"]], modules[line["schedule"]]
    done.add((line["schedule"], line["workload"]))
    fraction = line["read_us"] / line["us"]
    q = f"q{work['q_len']}" if work["q_len"] > 1 else ""
    ragged = len(set(task["lengths"][line["workload"]])) > 1
    decode = f" decode {line['decode_us']:7.2f} (+{line['decode_us'] - line['us']:.2f})" if line.get("decode_us") else ""
    if line.get("flush_us") is not None:
        decode += f" flush {line['flush_us']:+.2f} ({line['flush_us'] / line['decode_us']:.1%})"
    shape = f"{work['batch']:>4}x{work['kv_len']:<7}{'~' if ragged else q:3}"
    print(
        f"  {shape}{line['schedule']:28}{line['us']:8.2f} {fraction:5.3f} of {line['read_us']:7.2f}"
        f"  {line['relative_l2']:.1e}  r{module['registers']}{' SPILL' if module['spill'] else ''}{decode}",
        flush=True,
    )
    return {
        "provider": "kvgen", "backend": module["json"]["backend"], "spec": spec["name"], "target": task["target"], "workload": work,
        "lengths": task["lengths"][line["workload"]] if ragged else None,
        "schedule": module["json"], "us": line["us"], "low_us": line["low"], "bytes": line["bytes"],
        "tb_s": line["bytes"] / line["us"] * 1e-6, "read_us": line["read_us"], "read_fraction": fraction,
        "relative_l2": line["relative_l2"], "decode_us": line.get("decode_us"), "flush_us": line.get("flush_us"),
        "registers": module["registers"],
    }  # fmt: skip


def child(task: Row, take: Any) -> tuple[tuple[str, int] | None, str | None]:
    """Run one measuring process; where it was and what went wrong, or (None, None)."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(task, file)
        file.flush()
        script = Path(__file__).with_name("gpu_measure.py")
        environment = {**os.environ, "PYTHONPATH": f"{script.parent.parent}:{os.environ.get('PYTHONPATH', '')}"}
        process = subprocess.Popen(
            [sys.executable, str(script), file.name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdout is not None
        assert process.stderr is not None
        at: tuple[str, int] | None = None
        while True:
            ready, _, _ = select.select([process.stdout], [], [], SILENCE_S)
            if not ready:
                process.kill()
                process.wait()
                return at, f"silent for {SILENCE_S:.0f} s, killed"
            text = process.stdout.readline()
            if not text:
                break
            line = json.loads(text)
            if line["kind"] == "begin":
                at = (line["schedule"], line["workload"])
            else:
                take(line)
        errors = process.stderr.read()
        if process.wait() == 0:
            return None, None
        return at, f"exit status {process.returncode}: {errors.strip()[-700:]}"


if __name__ == "__main__":
    sys.exit(main())
