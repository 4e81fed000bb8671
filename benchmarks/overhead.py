"""What kvgen costs around its kernels: fetching one in a new process, fetching it again, calling it.

    python -m benchmarks.overhead

Builds a tiny spec into a temporary registry, then writes benchmarks/results/overhead.csv: medians in µs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

from benchmarks.common import write_rows

RUNS = 9
ROOT = Path(__file__).resolve().parents[1]
SPEC = {
    "name": "overhead",
    "arch": "cpu",
    "attention": {"q_heads": 2, "kv_heads": 1, "head_dim": 32, "dtype": "float16"},
    "key": {"bits": 4, "axis": "channel", "group": 32},
    "value": {"bits": 4, "axis": "token", "group": 32},
    "workloads": [{"batch": 1, "kv_len": 64}],
}
FETCH = """
import json, sys, time
import torch
start = time.perf_counter()
import kvgen
spec = kvgen.load_spec(sys.argv[1])
loaded = time.perf_counter() - start
start = time.perf_counter()
kernel = kvgen.get_kernel(spec)
first = time.perf_counter() - start
start = time.perf_counter()
for _ in range(1000):
    kvgen.get_kernel(spec)
again = (time.perf_counter() - start) / 1000
torch.set_num_threads(1)
kernel.set_threads(1)
cache = kernel.new_cache(1, 1 << 20)
k = torch.randn(1, 20, 1, 32, dtype=torch.float16)
kernel.prefill(cache, k, k)
q = torch.randn(1, 1, 2, 32, dtype=torch.float16)
new = k[:, :1]
variant = kernel.variant(spec.workloads[0])
out = torch.empty_like(q)
raw = (q, new, new, cache.packed, cache.k_residual, cache.v_residual, cache.lengths, None, None, None, out, None)
workspace = next(iter(cache.sequences.workspaces.values()))
def loop(call, count=2000):
    taken = []
    for _ in range(20):
        cache.lengths.fill_(20)
        cache.bound = 20
        start = time.perf_counter()
        for _ in range(count // 20):
            call()
        taken.append((time.perf_counter() - start) / (count // 20))
    return sorted(taken)[len(taken) // 2]
raw_call = loop(lambda: variant.module.decode(*raw, None, workspace, None, 0.17, 256, 512, cache.sequences.overflow.address, 1))
full_call = loop(lambda: kernel.decode(q, new, new, cache, out=out))
allocating = loop(lambda: kernel.decode(q, new, new, cache))
print(json.dumps([loaded, first, loaded + first, again, full_call - raw_call, allocating - raw_call, raw_call]))
"""
NAMES = (
    "`load_spec` in a new process, torch imported",
    "`get_kernel` in a new process, module in the cache",
    "both: a first fetch",
    "the same, of a spec that is new to the machine",
    "`get_kernel` again",
    "`decode` with `out` given, besides the module's function",
    "`decode` that allocates `out`, besides the module's function",
    "the module's function, over 20 tokens",
)


def main() -> None:
    """Measure in new processes and write the table."""
    with tempfile.TemporaryDirectory(prefix="kvgen-overhead-") as scratch:
        names = ("CACHE", "REGISTRY", "SITE")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **{f"KVGEN_{name}_DIR": f"{scratch}/{name.lower()}" for name in names}}
        environment["PYTHONPYCACHEPREFIX"] = f"{scratch}/bytecode"  # an installed package has its bytecode, a checkout may have none
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        spec = Path(scratch) / "overhead.yaml"
        spec.write_text(json.dumps(SPEC))
        build = [sys.executable, "-m", "kvgen", "build", str(spec), "--backend", "cpu", "--trials", "1", "--json"]
        subprocess.run(build, env=environment, check=True, stdout=subprocess.DEVNULL)
        runs = []
        for index in range(RUNS + 1):
            fresh = Path(scratch) / f"new{index}.yaml"  # another text of the same spec
            fresh.write_text(f"{spec.read_text()}\n# {index}\n")
            new, known = (_fetched(source, environment) for source in (fresh, spec))
            runs.append([*known[:3], new[2], *known[3:]])
        del runs[0]  # it wrote the bytecode and validated the entry
    from kvgen.toolchain.compilers import cpu_name

    rows = [(name, round(1e6 * median(run[index] for run in runs), 2)) for index, name in enumerate(NAMES)]
    facts = {"device": cpu_name(), "date": datetime.now(timezone.utc).date().isoformat()}
    write_rows("overhead", [{"what": name, "us": us} for name, us in rows], facts)
    for name, us in rows:
        print(f"{us:12.2f} µs  {name}")


def _fetched(spec: Path, environment: dict[str, str]) -> list[float]:
    """Seconds of the steps in a new process."""
    done = subprocess.run([sys.executable, "-c", FETCH, str(spec)], env=environment, check=True, capture_output=True, text=True)
    seconds: list[float] = json.loads(done.stdout)
    return seconds


if __name__ == "__main__":
    main()
