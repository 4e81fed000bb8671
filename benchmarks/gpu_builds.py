"""Builds with a short budget for cases of gpu_shapes.py, side by side: each GPU has one build at a time.

    python benchmarks/gpu_builds.py "group 16" "q_len 4" "16 bits" --budget 60s
    python benchmarks/gpu_builds.py "group 16" --budget 10m

A case is built for its workload, and for that of the case of the same name at 32 × 8192 where there is one. Every build is a
`kvgen build --fresh --no-plane` in a process of its own with an empty registry, one GPU and an equal part of the processors; compiled
modules are shared. Rows go to $OUT (or benchmarks/results) after every build, as GPU_builds.csv, or with `--name` as NAME.csv: the
winner's time, read fraction and schedule, the default's time, how many candidates were measured. Exits with 1 if a build failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import parser
from benchmarks.output import gpu_today, of_gpu, write_rows
from benchmarks.shape_cases import SHAPES, SHORTER, TARGET
from kvgen._nvml import visible_gpus

Row = dict[str, Any]


def main() -> int:
    """Build, print, write."""
    command = parser(__doc__)
    command.add_argument("cases", nargs="+", choices=[shape.name for shape in SHAPES], metavar="CASE")
    command.add_argument("--budget", default="60s")
    command.add_argument("--name", default=of_gpu("builds"))
    options = command.parse_args()
    gpus: Queue[int] = Queue()
    for index in range(max(1, len(visible_gpus()))):
        gpus.put(index)
    processors = sorted(os.sched_getaffinity(0))
    share = len(processors) // gpus.qsize()
    places = {index: processors[index * share : (index + 1) * share] for index in range(gpus.qsize())}
    facts = {"budget": options.budget, "side_by_side": len(places), "processors": share, **gpu_today()}
    rows: list[Row] = []
    lock = threading.Lock()

    def one(name: str) -> bool:
        index = gpus.get()
        try:
            found = build(name, options.budget, index, places[index])
        finally:
            gpus.put(index)
        with lock:
            rows.extend(found)
            write_rows(options.name, rows, facts)
            for row in found:
                print(*row.values(), flush=True)
        return bool(found)

    with ThreadPoolExecutor(len(places)) as pool:
        return 0 if all(list(pool.map(one, options.cases))) else 1


def build(name: str, budget: str, gpu: int, processors: Sequence[int]) -> list[Row]:
    """Rows of the workloads of a case; none if its build failed, which is told."""
    shapes = [shape for shape in SHAPES if shape.name in (name, f"{name}, {SHORTER}")]
    specs = [shape.spec.to_json() for shape in shapes]
    spec = specs[0] | {"name": name.replace(" ", "-").replace(",", ""), "workloads": [work for one in specs for work in one["workloads"]]}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "spec.json"
        file.write_text(json.dumps(spec))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": visible.split(",")[gpu] if visible else str(gpu),
            "KVGEN_REGISTRY_DIR": f"{folder}/registry",
            "KVGEN_SITE_DIR": f"{folder}/none",
        }
        words = [sys.executable, "-m", "kvgen", "build", str(file), "--arch", TARGET, "--budget", budget, "--fresh", "--no-plane", "--json"]
        done = subprocess.run(
            ["taskset", "-c", ",".join(map(str, processors)), *words], env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode:
        print(f"- {name}: {done.stderr.strip()[-2000:]}", flush=True)
        return []
    (result,) = json.loads(done.stdout)
    launches = {work_key(one["workload"]): one for one in result["entry"]["schedule"]["launches"]}
    layout = result["entry"]["schedule"]["layout"]
    return [row_of(name, timing, launches[work_key(timing["workload"])], layout, result) for timing in result["entry"]["timings"]]


def work_key(work: dict[str, Any]) -> tuple[int, int, int]:
    """What tells the workloads of a case apart."""
    return work["batch"], work["kv_len"], work["q_len"]


def row_of(name: str, timing: Row, launch: Row, layout: Row, result: Row) -> Row:
    """The winner of one workload."""
    batch, kv_len, q_len = work_key(timing["workload"])
    us, read, default = timing["us"], timing["read_us"], timing["default_us"]
    return {
        "case": name, "workload": f"{batch}x{kv_len}" + (f"q{q_len}" if q_len > 1 else ""), "backend": launch["backend"],
        "us": round(us, 3), "read_us": round(read, 3), "read_fraction": round(read / us, 4),
        "default_us": round(default, 3), "default_ratio": round(default / us, 4), "candidates": result["measured"] + result["known"],
        "schedule": " ".join(f"{key}={value}" for key, value in {**layout, **launch["launch"]}.items()),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
