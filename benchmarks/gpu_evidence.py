"""All that this project shows for a GPU, on every GPU of a host: builds and benches of the specs that ship, shapes, tests and more.

    python benchmarks/gpu_evidence.py --out DIR                     # everything
    python benchmarks/gpu_evidence.py --out DIR --only build,tests  # tasks whose name holds one of these
    python benchmarks/gpu_evidence.py --out DIR --only build --warm 0.5   # from the registered winners, in half the time
    python benchmarks/gpu_evidence.py --list

A GPU takes the next task when it is free, the longest first, with its share of the processors; a bench waits for the build of its spec.
A task is ended when its time is over, the others go on; the limits are guesses from hosts with 16 processors per GPU. DIR has a log per
task, the registry of the builds, and the files that belong into benchmarks/results.
"""

from __future__ import annotations

import csv
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Condition

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import parser
from benchmarks.output import write_csv
from kvgen._nvml import visible_gpus
from kvgen.tune.budget import PLANE

ROOT = Path(__file__).resolve().parent.parent
WIDE = {"serving_kv4": 285, "serving_kv2": 300, "serving_kv8": 230}
"""Specs of six workloads that ship, and the seconds of their searches and finals; the grid comes on top."""
NARROW = {
    "serving_kv4_token": 85, "serving_kv4_paged": 85, "llama31_70b_tp8_kv4": 150, "llama31_8b_k8v4": 70, "llama2_7b_mha_kv4": 110,
    "qwen3_8b_bf16_kv4": 90, "kitty": 45, "kitty_pro": 45, "kivi_int2": 30, "int8_per_channel": 30, "gemma2_9b_kv8": 40,
    "gpt_oss_local_kv8": 40, "gpt_oss_kv8": 40, "mistral_7b_kv4": 45, "int4_gqa_groupwise": 30,
}  # fmt: skip
PLANES = ("serving_kv8", "serving_kv4", "serving_kv2", "llama31_8b_k8v4", "serving_kv4_paged")
"""Specs whose launches are compared with the best ones between the points of the grid."""
LATE_S = 40
"""What a build takes beside its budget: processes that start, the entry."""


@dataclass(frozen=True)
class Task:
    """Commands that run one after the other on one GPU, for so many seconds in all, at most. OUT stands for the output folder."""

    name: str
    seconds: int
    commands: tuple[str, ...]
    after: str | None = None
    """The task that must have ended before, where it was chosen too."""


def tasks(warm: float | None = None) -> list[Task]:
    """The longest first. `warm`: builds begin with the registered winners and take this share of their time."""
    sanitizer, live = "compute-sanitizer --error-exitcode 1 --tool", "python benchmarks/gpu_sanitize.py"
    found = []
    for name, full in {**WIDE, **NARROW}.items():
        seconds = round(full * (warm or 1) / (1 - PLANE))
        build = f"python -m kvgen build examples/{name}.yaml --arch sm90 --budget {seconds}s" + (" --fresh" if warm is None else "")
        bench = f"python -m kvgen bench examples/{name}.yaml --arch sm90 --csv OUT/bench.{name}.csv"
        found.append(Task(f"build-{name}", seconds + LATE_S, (build,)))
        found.append(Task(f"bench-{name}", 120 if name in WIDE else 40, (bench,), after=f"build-{name}"))
        if name in PLANES:
            found.append(Task(f"plane-{name}", 400, (f"python benchmarks/gpu_plane.py examples/{name}.yaml",), after=f"build-{name}"))
    matrix = [f"python -m kvgen build examples/matrix/int8_{name}.yaml --arch sm90 --budget 200s" for name in ("quantize", "dequantize")]
    suite = "python -m kvgen bench --suite int8-kernels --arch sm90 --rounds 5 --csv OUT/h200_int8.csv"
    found += [
        Task("matrix", 3 * 200 + 2 * LATE_S, (*matrix, suite)),
        Task("tests", 560, ("python -m pytest tests/gpu -n 16 --tb=short",)),
        Task("shapes", 260, ("python benchmarks/gpu_shapes.py",)),
        Task("backends", 150, ("python benchmarks/gpu_backends.py",)),
        Task("prompts", 120, ("python benchmarks/gpu_prompt.py",)),
        Task("accuracy", 560, ("python -m benchmarks.accuracy",)),
        Task("reads", 60, ("python benchmarks/gpu_reads.py",)),
        Task("packing", 60, ("python benchmarks/gpu_pack.py k4v4,k8v8,k2v2 8x32768",)),
        Task("sanitizers", 240, (f"{live} --compile", f"{sanitizer} memcheck {live}", f"{sanitizer} racecheck {live}")),
    ]
    return sorted(found, key=lambda task: -task.seconds)


def main() -> int:
    """Run what was chosen; 1 if a task failed or ran out of time."""
    command = parser(__doc__)
    command.add_argument("--out", type=Path, default=Path("evidence"))
    command.add_argument("--only", help="parts of names, separated by commas")
    command.add_argument("--warm", type=float, metavar="SHARE", help="tune from the registered winners, with this share of the time")
    command.add_argument("--list", action="store_true", help="show the tasks and run nothing")
    options = command.parse_args()
    chosen = [task for task in tasks(options.warm) if not options.only or any(part in task.name for part in options.only.split(","))]
    if options.list:
        for task in chosen:
            print(f"{task.name}, at most {task.seconds} s", *task.commands, sep="\n    ")
        return 0
    devices = visible_gpus()
    if not devices:
        command.error("no NVIDIA GPU is visible")
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    good = run(chosen, devices, out)
    collect(out)
    return 0 if good else 1


def run(chosen: Sequence[Task], devices: Sequence[str], out: Path) -> bool:
    """Every task once, on whichever device is free. Whether all went well."""
    waiting, unfinished, changed = list(chosen), {task.name for task in chosen}, Condition()
    processors, began, results = sorted(os.sched_getaffinity(0)), time.monotonic(), []
    share = max(1, len(processors) // len(devices))

    def next_task() -> Task | None:
        with changed:
            while waiting:
                for task in waiting:
                    if task.after not in unfinished:
                        waiting.remove(task)
                        return task
                changed.wait()
            return None

    def serve(place: int) -> None:
        mine = processors[place * share : (place + 1) * share] or processors
        while (task := next_task()) is not None:
            results.append(outcome := perform(task, devices[place], mine, out))
            with changed:
                unfinished.discard(task.name)
                changed.notify_all()
            print(f"[{time.monotonic() - began:.0f} s] {task.name}: {outcome}", flush=True)

    with ThreadPoolExecutor(len(devices)) as pool:
        list(pool.map(serve, range(len(devices))))
    return all(result == "good" for result in results)


def perform(task: Task, device: str, processors: Sequence[int], out: Path) -> str:
    """Run a task's commands; what became of it."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": device, "OUT": str(out), "OMP_NUM_THREADS": "1"}
    if task.name.startswith(("build", "bench", "plane")):
        environment["KVGEN_REGISTRY_DIR"] = str(out / "registry")
    end = time.monotonic() + task.seconds
    with (out / f"{task.name}.txt").open("w") as log:
        for command in task.commands:
            words = [sys.executable if word == "python" else word.replace("OUT", str(out)) for word in shlex.split(command)]
            pinned = ["taskset", "-c", ",".join(map(str, processors)), *words]
            started = subprocess.Popen(pinned, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                status = started.wait(max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait()
                return f"out of time: {command}"
            if status:
                return f"exit status {status}: {command}"
    return "good"


def collect(out: Path) -> None:
    """The benches' rows as one table, those of FlashInfer as another, and what the builds said as one text."""
    rows = [row for file in sorted(out.glob("bench.*.csv")) for row in csv.DictReader(file.open())]
    write_csv(out / "h200_attend.csv", [row for row in rows if row["provider"] != "flashinfer"])
    write_csv(out / "h200_flashinfer.csv", [row for row in rows if row["provider"] == "flashinfer"])
    planes = [row for file in sorted(out.glob("h200_plane.*.csv")) for row in csv.DictReader(file.open())]
    write_csv(out / "h200_plane.csv", planes)
    told = []
    for file in sorted(out.glob("build-*.txt")):
        lines = [line.rstrip() for line in file.read_text(errors="replace").splitlines()]
        start = next((i for i, line in enumerate(lines) if ", layout " in line), None)
        if start is not None:
            told += [*lines[start : next((i for i, line in enumerate(lines) if line.startswith("registered")), start)], ""]
    if told:
        (out / "h200_tune.txt").write_text("\n".join(told))


if __name__ == "__main__":
    sys.exit(main())
