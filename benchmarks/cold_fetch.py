"""How long the first `get_kernel` of an entry takes, which compiles its launches in parallel.

    python -m benchmarks.cold_fetch examples/serving_kv4.yaml examples/qwen3_8b_bf16_kv4.yaml
    python -m benchmarks.cold_fetch examples/serving_kv4.yaml --compile-only sm90      # without a GPU
    python -m benchmarks.cold_fetch examples/llama31_8b_kv4.yaml --arch cpu

Each fetch is a process of its own with an empty cache; the registry is the one that ships with kvgen. `seconds` is `get_kernel`, after
imports; with `--compile-only`, the choice of the entry and the compilations. `slowest_s` is the longest compilation of a module, `sum_s`
all of them. Writes cold_fetch.csv into $OUT or benchmarks/results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

from benchmarks.command import parser, processors
from benchmarks.output import folder, write_csv
from kvgen.arch import Target
from kvgen.spec import KernelSpec

ROOT = Path(__file__).resolve().parents[1]
CHILD = "import sys; from benchmarks.cold_fetch import fetch; fetch(*sys.argv[1:])"


def main() -> int:
    """Fetch every spec once, and write a row for each."""
    command = parser(__doc__)
    command.add_argument("specs", nargs="+", type=Path)
    where = command.add_mutually_exclusive_group()
    where.add_argument("--arch", default="", help="a target other than the spec's")
    where.add_argument("--compile-only", default="", metavar="TARGET", help="compile the launches for a target that is not here")
    options = command.parse_args()
    rows = [fetched(spec, options.arch or options.compile_only, get=not options.compile_only) for spec in options.specs]
    for row in rows:
        print("  ".join(f"{name}={value}" for name, value in row.items()))
    write_csv(folder() / "cold_fetch.csv", rows)
    return 0


def fetched(spec: Path, arch: str, *, get: bool) -> dict[str, Any]:
    """The row of a fetch in a new process with an empty cache."""
    with tempfile.TemporaryDirectory(prefix="kvgen-cold-") as scratch:
        stores = {f"KVGEN_{name}_DIR": f"{scratch}/{name.lower()}" for name in ("CACHE", "REGISTRY", "SITE")}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, **stores, "PYTHONPATH": path}
        child = [sys.executable, "-c", CHILD, str(spec), arch, "get_kernel" if get else "compile"]
        row: dict[str, Any] = json.loads(subprocess.run(child, env=environment, check=True, stdout=subprocess.PIPE).stdout)
    return row


def fetch(file: str, arch: str, way: str) -> None:
    """Print the row of a fetch in this process as JSON."""
    import kvgen.api.kernel  # noqa: F401  (with torch, which a server has imported)
    from kvgen import get_kernel, load_spec
    from kvgen._nvml import gpu_identity
    from kvgen.toolchain import ArtifactCache
    from kvgen.toolchain.compilers import cpu_name

    spec = load_spec(file)
    if arch:
        spec = replace(spec, arch=cast(Target, arch))
    started = time.perf_counter()
    get_kernel(spec) if way == "get_kernel" else compile_launches(spec)
    seconds = time.perf_counter() - started
    cache = ArtifactCache()
    made = [artifact.resources for found in cache.root.glob("modules/*/*") if (artifact := cache.get(found.name)) is not None]
    row = {
        "spec": spec.name, "way": way, "modules": len(made), "seconds": round(seconds, 2),
        "slowest_s": round(max(one.seconds for one in made), 2), "sum_s": round(sum(one.seconds for one in made), 2),
        "compiler": made[0].compiler, "cores": processors(), "cpu": cpu_name(), "gpu": gpu_identity().get("name", ""),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }  # fmt: skip
    print(json.dumps(row))


def compile_launches(spec: KernelSpec) -> None:
    """What `get_kernel` does before it loads modules, for a target that need not be here."""
    from kvgen.registry.default import default_entry
    from kvgen.registry.modules import modules
    from kvgen.registry.select import select
    from kvgen.spec.target import resolve

    target = resolve(spec.arch)
    selection = select(spec, target)
    modules(selection.entry or default_entry(spec, target, selection)[0])


if __name__ == "__main__":
    sys.exit(main())
