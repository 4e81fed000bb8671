"""How long one TileLang variant takes from a spec to a loadable library: lowering and compiling, nothing cached.

    python benchmarks/tilelang_build.py [--points k4v4/w8u2s2,k2v2/w16u4s4] [--target sm90]

Needs TileLang and nvcc, no GPU. Also writes benchmarks/results/tilelang_build.json; quiet machines give honest figures.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import parser
from benchmarks.gpu_words import schedules_of, spec_of, workload_of
from benchmarks.output import write_json
from kvgen.lower.backends import get_backend
from kvgen.measure.device import cpu_fingerprint
from kvgen.toolchain.cache import ArtifactCache
from kvgen.toolchain.compile import build

POINTS = "k4v4/w8u2s2,k8v8/w8u2s2,k2v2/w12u4s4,k2v2/w16u4s4.cl,k4v4:token:kg32:vg32/w8u2s2,k4v4:d256:bf16/default"


def one(words: str, schedule: str, target: Any) -> dict[str, Any]:
    """Seconds of a point, in an empty cache."""
    backend = get_backend("tilelang")
    spec = spec_of(words, target, [workload_of("8x32768")])
    (point,) = schedules_of(schedule, backend, spec, target)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVGEN_CACHE_DIR"] = folder
        started = time.monotonic()
        source = backend.lower(spec, point, target)
        lowered = time.monotonic()
        build(source, ArtifactCache())
        done = time.monotonic()
    seconds = {"lower_s": round(lowered - started, 2), "compile_s": round(done - lowered, 2), "total_s": round(done - started, 2)}
    return {"spec": words, "schedule": schedule, "target": target, **seconds}


def main() -> None:
    """Every point in turn."""
    command = parser(__doc__)
    command.add_argument("--points", default=POINTS)
    command.add_argument("--target", default="sm90")
    options = command.parse_args()
    about = {key: value for key, value in cpu_fingerprint().items() if key in ("name", "cores")}
    about |= {"load_before": round(os.getloadavg()[0], 2), "date": datetime.now(timezone.utc).date().isoformat()}
    rows = []
    for point in options.points.split(","):
        words, _, schedule = point.rpartition("/")
        rows.append({**one(words, schedule, options.target), "load_after": round(os.getloadavg()[0], 2)})
        print(rows[-1], flush=True)
    write_json("tilelang_build", {**about, "points": rows})


if __name__ == "__main__":
    main()
