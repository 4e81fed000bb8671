"""How many candidates a build measures in the same time on one GPU and on several, and whether the winners are the same.

    python benchmarks/gpu_devices.py examples/serving_kv4.yaml --arch sm90 --budget 75s
    python benchmarks/gpu_devices.py examples/serving_kv4.yaml --arch sm90 --budget 75s --counts 1,2,4

Every build is a process of its own, with an empty registry and no measurement of an earlier one. `cold`: nothing is compiled;
`compiled`: the modules of the cold builds are there, so that compilers, which all devices share, do not bound the rate.
Rows: devices, seconds until the first measurement ended, seconds and candidates of the search, candidates per second, and the winners'
times by workload. The last lines say how many times the candidates of one device were measured, and the largest ratio of a winner's
time to one device's.
Writes GPU_devices.csv into $OUT or benchmarks/results, after every build.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import parser, processors
from benchmarks.output import gpu_today, of_gpu, write_rows
from kvgen._nvml import visible_gpus

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Build with every number of devices, cold and compiled; 1 if a build failed."""
    command = parser(__doc__)
    command.add_argument("spec", type=Path)
    command.add_argument("--arch", default="native")
    command.add_argument("--budget", default="75s")
    command.add_argument("--counts", help="numbers of devices, e.g. 1,4; one and all by default")
    command.add_argument("--only", choices=("cold", "compiled"), help="compiled: with one cold build, which is not a row")
    command.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = command.parse_args()
    if options.one is not None:
        print(json.dumps(build(options.spec, options.arch, options.budget, options.one)))
        return 0
    counts = sorted({int(word) for word in options.counts.split(",")} if options.counts else {1, max(1, len(visible_gpus()))})
    facts = {"spec": options.spec.stem, "budget": options.budget, "processors": processors(), **gpu_today()}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for modules in ("cold", "compiled"):
            for count in counts if modules == (options.only or modules) else counts[-1:]:
                cache = Path(folder) / ("cache" if modules == "compiled" else f"cold-{count}")
                answer = _started(options, count, cache)
                if answer is None:
                    return 1
                if modules == "cold":
                    shutil.copytree(cache / "modules", Path(folder) / "cache" / "modules", dirs_exist_ok=True)
                if options.only in (None, modules):
                    rows.append({"modules": modules, "devices": count, **answer})
                    print(rows[-1], flush=True)
                    write_rows(of_gpu("devices"), [{**row, "winners_us": json.dumps(row["winners_us"])} for row in rows], facts)
    for modules in dict.fromkeys(row["modules"] for row in rows):
        for line in compared([row for row in rows if row["modules"] == modules]):
            print(f"{modules}: {line}")
    return 0


def _started(options: argparse.Namespace, count: int, cache: Path) -> dict[str, Any] | None:
    """What a build in a process of its own reports; None if it failed."""
    shutil.rmtree(cache / "studies", ignore_errors=True)
    shutil.rmtree(cache / "tuning", ignore_errors=True)
    places = {
        "KVGEN_CACHE_DIR": cache,
        "KVGEN_REGISTRY_DIR": cache / f"registry-{time.monotonic_ns()}",
        "KVGEN_SITE_DIR": cache / "no-site",
    }
    environment = os.environ | {name: str(place) for name, place in places.items()}
    words = [sys.executable, __file__, str(options.spec), "--arch", options.arch, "--budget", options.budget, "--one", str(count)]
    done = subprocess.run(words, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    answer: dict[str, Any] | None = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    return answer


def build(spec: Path, arch: str, budget: str, devices: int) -> dict[str, Any]:
    """Tune in this process; the search's numbers, and the winners' times."""
    from kvgen.spec import load_spec
    from kvgen.tune.budget import Budget, parse_duration
    from kvgen.tune.progress import Progress
    from kvgen.tune.tuner import tune

    first: list[float] = []
    search: list[Progress] = []

    def watch(progress: Progress) -> None:
        if progress.best and not first:
            first.append(progress.elapsed)
        if progress.phase == "measuring" or not search:
            search[:] = [progress]

    given = {**load_spec(spec).to_json(), "arch": arch}
    chosen = list(range(devices)) if visible_gpus() else None
    bound = Budget(None, parse_duration(budget))
    result = tune(load_spec(given), budget=bound, progress=watch, devices=chosen, fresh=True, plane=False)
    (end,) = search
    seconds = end.elapsed - first[0] if first else end.elapsed
    return {
        "first_s": round(first[0], 1) if first else None,
        "search_s": round(end.elapsed, 1),
        "candidates": end.done,
        "failed": sum(end.failures.values()),
        "per_second": round(end.done / end.elapsed, 3),
        "per_second_after_start": round((end.done - 1) / seconds, 3) if seconds > 0 else None,
        "winners_us": {timing.workload.key: round(timing.us, 3) for timing in result.entry.timings},
    }


def compared(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each number of devices beside the first."""
    base, *others = rows
    lines = []
    for row in others:
        worst = max(us / base["winners_us"][key] for key, us in row["winners_us"].items())
        rate = row["per_second"] / base["per_second"]
        lines.append(
            f"{row['devices']} devices measure {rate:.2f} times the candidates of {base['devices']}; winners at most {worst:.3f} of its"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
