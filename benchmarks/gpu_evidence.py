"""All that this project shows for a GPU, on every GPU of a host: builds and benches of the specs that ship, shapes, tests and more.

    python benchmarks/gpu_evidence.py --out DIR                     # everything
    python benchmarks/gpu_evidence.py --out DIR --only build,tests  # tasks whose name holds one of these
    python benchmarks/gpu_evidence.py --out DIR --only build --warm 0.5   # from the registered winners, in half the time
    python benchmarks/gpu_evidence.py --out DIR --seconds 570 --pack FILE.tar.gz   # what fits into a command of ten minutes
    python benchmarks/gpu_evidence.py --list

A GPU takes the next task when it is free: one GPU in the order of `--list`, several the longest first, each with its share of the
processors; a bench waits for the build of its spec. A task that ended well is not run again over the same DIR, unless with `--again`, so
the same command repeated goes on where the last one stopped. A task whose time is over is interrupted, as by Ctrl-C: a build then
registers its best so far, and pytest tells its failures. The others go on. With `--seconds`, a task that may not end in time is not begun.

DIR has a log per task, the registry of the builds, outcomes.json with the seconds that each task took, and the files that belong into
benchmarks/results; `--pack` makes one file of all that. The limits are guesses from hosts with 16 processors per GPU. Exits with 1 where
a task failed, and with 0 where some were only not begun.
"""

from __future__ import annotations

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Condition

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import figures
from benchmarks.command import parser
from benchmarks.output import of_gpu, write_csv
from kvgen._nvml import visible_gpus

ROOT = Path(__file__).resolve().parent.parent
WIDE = {"serving_kv4": 285, "serving_kv2": 300, "serving_kv8": 230}
"""Specs of six workloads that ship, and the seconds of their searches and finals."""
NARROW = {
    "serving_kv4_token": 85, "serving_kv4_paged": 85, "llama31_70b_tp8_kv4": 150, "llama31_8b_k8v4": 70, "llama2_7b_mha_kv4": 110,
    "qwen3_8b_bf16_kv4": 90, "kitty": 45, "kitty_pro": 45, "kivi_int2": 30, "int8_per_channel": 30, "gemma2_9b_kv8": 40,
    "gpt_oss_local_kv8": 40, "gpt_oss_kv8": 40, "mistral_7b_kv4": 45, "int4_gqa_groupwise": 30,
    "int4_gqa_rowwise": 30, "gemma2_9b_global_kv8": 40, "serving_kv8_token": 85,
}  # fmt: skip
PLANES = ("serving_kv8", "serving_kv4", "serving_kv2", "llama31_8b_k8v4", "serving_kv4_paged")
"""Specs with a dispatch table: their launches are measured over the grid, and compared with the best ones between its points."""
DEFAULT = "default_kv4"
"""A spec without workloads, which has a registry of its own: the entry of `serving_kv4` has its workload, too."""
DEFAULT_S = 500
"""Of its build, all of it: less than `kvgen build` takes by default, so that it fits into a command of ten minutes."""
GRID_S, PLANE_S = 480, 300
"""Of a build that only measures the grid, of which a final takes up to a third; of a comparison between the grid's points."""
LATE_S = 40
"""What a build or a comparison takes beside its budget: processes that start, the entry."""
CASES = {
    "60s-1": ("V per channel, 8 bits", "V per channel, 4 bits", "head_dim 80", "16 bits, 8x32768"),
    "60s-2": ("head_dim 112", "head_dim 192", "group 64", "K 2 bits, V 4 bits"),
    "10m-group-16": ("group 16",),
    "10m-q_len-4": ("q_len 4",),
    "10m-16-bits": ("16 bits",),
}
"""Cases of shape_cases.py that a task builds one after the other. Its name begins with the budget of each build."""
BUDGETS = {"60s": 60, "10m": 600}
"""Seconds of a build of these cases: a short one, and the default of `kvgen build`, which is too long for a command of ten minutes."""
FLUSHED = ("k2v2:boost1/8:sink32:local128:page128", "k2v2:boost1/4:sink32:local128:page128", "k4v4", "k2v2")
"""Kitty, Kitty Pro, and what their flush is compared with, in the words of gpu_words.py."""
TESTS = {
    "others": (240, ("matrix", "decode_loop", "accuracy", "api", "reference", "steps", "mixed", "call_order", "plan", "page_example")),
    "lives": (300, ("properties", "unquantized", "window", "decode", "pack")),
    "extend": (240, ("extend", "extremes")),
    "formats": (360, ("formats",)),
    "tilelang": (420, ("tilelang",)),
}
"""Files of tests/gpu that run together, and their seconds where nothing is compiled yet."""
GRACE_S = 20
"""Seconds that an interrupted task has to end by itself."""
GOOD = "good"
OUTCOMES = "outcomes.json"


@dataclass(frozen=True)
class Task:
    """Commands that run one after the other on one GPU, for so many seconds in all, at most. OUT stands for the output folder."""

    name: str
    seconds: int
    commands: tuple[str, ...]
    after: tuple[str, ...] = ()
    """Tasks that must have ended well before, where they were chosen too."""
    threads: bool = False
    """Whether torch computes on all of the task's processors: references of large matrices and of formats are the CPU's work."""


def tasks(warm: float | None = None) -> list[Task]:
    """In the order in which one GPU runs them. `warm`: builds begin with the registered winners and take this share of their time."""
    fresh = " --fresh" if warm is None else ""

    def build(name: str, full: int) -> Task:
        seconds = round(full * (warm or 1))
        command = f"python -m kvgen build examples/{name}.yaml --arch sm90 --budget {seconds}s --no-plane{fresh}"
        return Task(f"build-{name}", seconds + LATE_S, (command,))

    def grid(name: str) -> Task:  # of what the search found: --trials leaves the time to the grid
        command = f"python -m kvgen build examples/{name}.yaml --arch sm90 --budget {GRID_S}s --trials 1 --plane"
        return Task(f"build-{name}-grid", GRID_S + LATE_S, (command,), after=(f"build-{name}",))

    def plane(name: str) -> Task:
        command = f"python benchmarks/gpu_plane.py examples/{name}.yaml --seconds {PLANE_S}"
        return Task(f"plane-{name}", PLANE_S + 2 * LATE_S, (command,), after=(f"build-{name}-grid",))

    def default() -> tuple[Task, Task]:
        apart = "env KVGEN_REGISTRY_DIR=OUT/registry-default python"
        build = f"{apart} -m kvgen build examples/{DEFAULT}.yaml --arch sm90 --budget {DEFAULT_S}s --fresh"
        plane = f"{apart} benchmarks/gpu_plane.py examples/{DEFAULT}.yaml --seconds {PLANE_S}"
        return (
            Task(f"build-{DEFAULT}", DEFAULT_S + LATE_S, (build,)),
            Task(f"plane-{DEFAULT}", PLANE_S + 2 * LATE_S, (plane,), after=(f"build-{DEFAULT}",)),
        )

    def bench(name: str) -> Task:
        command = f"python -m kvgen bench examples/{name}.yaml --arch sm90 --csv OUT/bench.{name}.csv"
        entry = f"build-{name}-grid" if name in PLANES else f"build-{name}"
        return Task(f"bench-{name}", 180 if name in WIDE else 60, (command,), after=(entry,))

    def tests(name: str) -> Task:
        seconds, files = TESTS[name]
        return Task(f"tests-{name}", seconds, (f"python -m pytest {' '.join(map(_test_file, files))} -n auto -v --tb=short",))

    def matrix(name: str) -> Task:
        command = f"python -m kvgen build examples/matrix/int8_{name}.yaml --arch sm90 --budget 150s"
        return Task(f"matrix-build-{name}", 150 + LATE_S, (command,))

    def cases(name: str) -> Task:
        budget, chosen = name.partition("-")[0], CASES[name]
        words = f"{' '.join(map(shlex.quote, chosen))} --budget {budget} --name {of_gpu(f'builds.{name}')}"
        return Task(f"cases-{name}", len(chosen) * (BUDGETS[budget] + LATE_S), (f"python benchmarks/gpu_builds.py {words}",))

    names = [*WIDE, *NARROW]
    flush = f"python benchmarks/gpu_decode.py {','.join(FLUSHED)} 8x32768,32x8192 default --decode --name {of_gpu('flush')}"
    suite = f"python -m kvgen bench --suite int8-kernels --arch sm90 --rounds 5 --csv OUT/{of_gpu('int8')}.csv"
    live = "python benchmarks/gpu_sanitize.py"
    sanitizer = "compute-sanitizer --error-exitcode 1 --tool"
    return [
        tests("others"),
        *map(matrix, ("quantize", "dequantize")),
        Task("matrix-bench", 400, (suite,), after=("matrix-build-quantize", "matrix-build-dequantize"), threads=True),
        *(build(name, {**WIDE, **NARROW}[name]) for name in names),
        # in the type for which all four formats have tuned entries
        Task("generate", 560, ("python benchmarks/gpu_generate.py --dtype float16 --budget 470",), threads=True),
        *map(grid, PLANES),
        *map(plane, PLANES),
        *default(),
        *map(bench, names),
        Task("accuracy", 560, ("python -m benchmarks.accuracy",), threads=True),
        *map(tests, list(TESTS)[1:]),
        Task("shapes", 540, ("python benchmarks/gpu_shapes.py",)),
        Task("backends", 300, ("python benchmarks/gpu_backends.py",)),
        Task("prompts", 180, ("python benchmarks/gpu_prompt.py",)),
        Task("reads", 90, ("python benchmarks/gpu_reads.py",)),
        Task("flush", 240, (flush,)),
        *map(cases, CASES),
        Task("packing", 120, ("python benchmarks/gpu_pack.py k4v4,k8v8,k2v2 8x32768",)),
        Task("sanitizers", 400, (f"{live} --compile", f"{sanitizer} memcheck {live}", f"{sanitizer} racecheck {live}")),
    ]


def _test_file(name: str) -> str:
    return f"tests/gpu/test_{name}.py"


def main() -> int:
    """Run what was chosen; 1 if a task failed or ran out of time."""
    command = parser(__doc__)
    command.add_argument("--out", type=Path, default=Path("evidence"))
    command.add_argument("--only", help="parts of names, separated by commas")
    command.add_argument("--warm", type=float, metavar="SHARE", help="tune from the registered winners, with this share of the time")
    command.add_argument("--seconds", type=float, help="of all of this: begin nothing that may not end by then")
    command.add_argument("--again", action="store_true", help="run tasks that ended well over this DIR, too")
    command.add_argument("--pack", type=Path, metavar="FILE", help="write DIR as one .tar.gz")
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
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes would ignore it, and so would the tasks
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    try:
        good = run(chosen, devices, out, seconds=options.seconds, again=options.again)
    finally:
        collect(out)
        if options.pack:
            pack(out, options.pack)
    return 0 if good else 1


def run(chosen: Sequence[Task], devices: Sequence[str], out: Path, *, seconds: float | None = None, again: bool = False) -> bool:
    """Every task once, on whichever device is free; with `seconds`, those that end by then. Whether none failed."""
    todo = Todo(chosen, out, seconds, again=again, longest_first=len(devices) > 1)
    processors = sorted(os.sched_getaffinity(0))
    share = max(1, len(processors) // len(devices))

    def serve(place: int) -> None:
        mine = processors[place * share : (place + 1) * share] or processors
        while (task := todo.next()) is not None:
            began = time.monotonic()
            todo.end(task, perform(task, devices[place], mine, out), time.monotonic() - began)

    with ThreadPoolExecutor(len(devices)) as pool:
        list(pool.map(serve, range(len(devices))))
    if todo.waiting:
        print("not begun, for want of time:", ", ".join(f"{task.name} ({task.seconds} s)" for task in todo.waiting), flush=True)
    return not todo.failed


class Todo:
    """The tasks of a run, for the threads of its devices, and what became of those that were run over this folder."""

    def __init__(self, chosen: Sequence[Task], out: Path, seconds: float | None, *, again: bool, longest_first: bool) -> None:
        self._file, self._began, self._seconds = out / OUTCOMES, time.monotonic(), seconds
        self._outcomes: dict[str, dict[str, object]] = json.loads(self._file.read_text()) if self._file.exists() else {}
        done = set() if again else {name for name, known in self._outcomes.items() if known["outcome"] == GOOD}
        self.waiting = [task for task in chosen if task.name not in done]
        if longest_first:
            self.waiting.sort(key=lambda task: -task.seconds)
        self._unfinished = {task.name for task in self.waiting}
        self.failed: set[str] = set()
        self._changed = Condition()

    def next(self) -> Task | None:
        """The next task, which is no longer waiting; None where none is left for which there is time. Waits for what it comes after."""
        with self._changed:
            while True:
                for task in [task for task in self.waiting if self.failed & set(task.after)]:
                    self.waiting.remove(task)
                    self._ended(task, f"not begun, because {min(self.failed & set(task.after))} failed", None)
                late = {task.name for task in self.waiting if not self._in_time(task)}
                due = [task for task in self.waiting if task.name not in late and not late & set(task.after)]
                ready = [task for task in due if not self._unfinished & set(task.after)]
                if ready:
                    self.waiting.remove(ready[0])
                    return ready[0]
                if not due:
                    return None
                self._changed.wait()

    def end(self, task: Task, outcome: str, seconds: float) -> None:
        """Keep what became of a task, and tell it."""
        with self._changed:
            self._ended(task, outcome, round(seconds, 1))

    def _ended(self, task: Task, outcome: str, seconds: float | None) -> None:
        self._unfinished.discard(task.name)
        if outcome != GOOD:
            self.failed.add(task.name)
        self._outcomes[task.name] = {"outcome": outcome, "seconds": seconds}
        self._file.write_text(json.dumps(self._outcomes, indent=1) + "\n")
        print(f"[{time.monotonic() - self._began:.0f} s] {task.name}: {outcome}", flush=True)
        self._changed.notify_all()

    def _in_time(self, task: Task) -> bool:
        return self._seconds is None or time.monotonic() - self._began + task.seconds + GRACE_S <= self._seconds


def perform(task: Task, device: str, processors: Sequence[int], out: Path) -> str:
    """Run a task's commands; what became of it."""
    threads = len(processors) if task.threads else 1
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": device, "OUT": str(out), "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    if not task.name.startswith("tests"):
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
                interrupt(started)
                return f"out of time: {command}"
            if status:
                return f"exit status {status}: {command}"
    return GOOD


def interrupt(started: subprocess.Popen[bytes]) -> None:
    """End a command as Ctrl-C does, so that it keeps what it has; after GRACE_S, and with what it started, by force."""
    with suppress(ProcessLookupError):
        started.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        started.wait(GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    started.wait()


def collect(out: Path) -> None:
    """The benches' rows as one table, those of FlashInfer as another, and what the builds said as one text."""
    rows = [row for file in sorted(out.glob("bench.*.csv")) for row in csv.DictReader(file.open())]
    write_csv(out / f"{of_gpu('attend')}.csv", [row for row in rows if row["provider"] != "flashinfer"])
    write_csv(out / f"{of_gpu('flashinfer')}.csv", [row for row in rows if row["provider"] == "flashinfer"])
    planes = [row for file in sorted(out.glob("*_plane.*.csv")) for row in csv.DictReader(file.open())]
    write_csv(out / f"{of_gpu('plane')}.csv", planes)
    builds = [row for file in sorted(out.glob("*_builds.*.csv")) for row in csv.DictReader(file.open())]
    name = f"{of_gpu('builds')}.csv"
    known = figures.rows(name) if (figures.RESULTS / name).exists() else []
    write_csv(out / name, replaced(known, builds, ("case", "workload", "budget")))
    told = []
    for file in sorted(out.glob("build-*.txt")):
        lines = [line.rstrip() for line in file.read_text(errors="replace").splitlines()]
        start = next((i for i, line in enumerate(lines) if ", layout " in line), None)
        if start is not None:
            told += [*lines[start : next((i for i, line in enumerate(lines) if line.startswith("registered")), start)], ""]
    if told:
        (out / f"{of_gpu('tune')}.txt").write_text("\n".join(told))


def replaced(known: Sequence[dict[str, str]], found: Sequence[dict[str, str]], key: Sequence[str]) -> list[dict[str, str]]:
    """Known rows, those of the same key replaced by the ones that were found; then the other ones that were found."""
    new = {tuple(row[name] for name in key): row for row in found}
    kept = [new.pop(tuple(row[name] for name in key), row) for row in known]
    return [*kept, *new.values()] if found else []


def pack(out: Path, file: Path) -> None:
    """Everything in the output folder as one compressed archive; a registry has more folders than some ways to fetch files allow."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:gz") as archive:
        for one in sorted(out.rglob("*")):
            if one.is_file() and one.resolve() != file.resolve():
                archive.add(one, one.relative_to(out))


if __name__ == "__main__":
    sys.exit(main())
