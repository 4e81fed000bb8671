"""Products of floats and of 16-bit integers (`dot`) on this CPU, in turns in one process: Llama-3.1-8B's heads, 8, 4 and 2 bits.

    python -m benchmarks.cpu_dot [--rounds 15]

One thread, as many copies of a cache as `kvgen bench` reads in turn, CPU time of that thread: waiting for a processor that others use
does not count. Each `dot` takes the fastest of a few launches, over caches in pages of 4 KB and, if they are as large as `new_cache` asks
huge pages for, in pages of 2 MB. Ends with an error if Linux gives none. Writes benchmarks/results/cpu_dot.csv.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks import output
from benchmarks.command import parser
from benchmarks.cpu_llama31 import BITS, spec_of
from benchmarks.turns import take_turns
from kvgen.cli.bench import facts
from kvgen.lower.schedule import Params, Schedule
from kvgen.spec import KernelSpec, Workload

if TYPE_CHECKING:
    from kvgen.measure.inputs import WorkloadInputs
    from kvgen.runtime.variant import Variant

DOTS = ("fp32", "int16")
PAGES = ("4 KB", "2 MB")
TILES = ((4, 4, 4), (4, 4, 8), (2, 2, 4), (2, 4, 4))
"""key_tiles, value_tiles, prefetch."""
PR_SET_THP_DISABLE = 41
"""The number of Linux's prctl operation that refuses this process huge pages."""
BLOCK = Params(block=128, order="simd")
LEAST_NS = 2_000_000


def main() -> None:
    """Compile, time, print, write."""
    from kvgen.measure.job import TimingPolicy

    command = parser(__doc__)
    command.add_argument("--rounds", type=int, default=15)
    options = command.parse_args()
    rows = [row for bits in BITS for work in spec_of(bits).workloads for row in compared(spec_of(bits), work, options.rounds)]
    told = {name: fact for name, fact in facts("cpu", TimingPolicy()).items() if name in ("device", "torch", "kvgen", "date")}
    output.write_csv(output.folder() / "cpu_dot.csv", [{**row, **told} for row in rows])


def launches(dot: str) -> Iterable[Params]:
    """Four query rows at a time, as a KV head has."""
    for key_tiles, value_tiles, prefetch in TILES:
        yield Params(dot=dot, rows=4, key_tiles=key_tiles, value_tiles=value_tiles, chunk=128, split_tokens=4096, prefetch=prefetch)


@contextmanager
def pages_of(size: str) -> Iterator[None]:
    """Memory that is written meanwhile has pages of this size, if it is as large as `new_cache` asks huge pages for."""
    prctl, before = ctypes.CDLL(None).prctl, huge_bytes()
    if prctl(PR_SET_THP_DISABLE, int(size == "4 KB"), 0, 0, 0):
        sys.exit("Linux does not let this process choose the size of its pages")
    try:
        yield
    finally:
        prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0)
    if (size == "2 MB") != (huge_bytes() > before):
        sys.exit(f"Linux gives no pages of {size}: see /sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes() -> int:
    """Bytes of this process in huge pages."""
    (line,) = [line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("AnonHugePages:")]
    return int(line.split()[1]) << 10


def compared(spec: KernelSpec, work: Workload, rounds: int) -> list[dict[str, Any]]:
    """A row of each `dot` and size of pages at a workload: its fastest launch."""
    from kvgen.lower.backends import get_backend
    from kvgen.lower.schedule import layout_of
    from kvgen.measure.inputs import WorkloadInputs
    from kvgen.runtime.huge_pages import LEAST_BYTES
    from kvgen.runtime.module import load
    from kvgen.runtime.variant import Variant
    from kvgen.toolchain import build

    backend, layout = get_backend("cpu"), layout_of(spec, BLOCK)
    variants = {
        launch: Variant(spec, layout, load(build(backend.lower(spec, Schedule("cpu", BLOCK, launch), "cpu")).path))
        for dot in DOTS
        for launch in launches(dot)
    }
    first = next(iter(variants.values()))
    inputs: dict[str, WorkloadInputs] = {}
    for size in PAGES:
        if size == "2 MB" and inputs["4 KB"].caches[0].packed.nbytes < LEAST_BYTES:
            continue
        with pages_of(size):
            inputs[size] = WorkloadInputs(first, work, "cpu")
    kernels = {(launch, size): lambda v=v, i=i: cpu_time(v, i) for launch, v in variants.items() for size, i in inputs.items()}
    samples, _ = take_turns(kernels, rounds)
    times = {kernel: median(found) for kernel, found in samples.items()}
    rows = []
    for dot, size in itertools.product(DOTS, inputs):
        best, us = min(((launch, us) for (launch, of), us in times.items() if (launch["dot"], of) == (dot, size)), key=lambda one: one[1])
        row = {"spec": spec.name, "batch": work.batch, "kv_len": work.kv_len, "bytes": inputs[size].nbytes, "pages": size, "dot": dot}
        row |= {name: best[name] for name in ("key_tiles", "value_tiles", "prefetch")}
        rows.append({**row, "cpu_us": round(us, 1)})
        print(f"{spec.name:18}{work.key:>14}  {size} {dot:6} {us:9.0f} µs", flush=True)
    return rows


def cpu_time(variant: Variant, inputs: WorkloadInputs) -> list[float]:
    """One sample: the thread's CPU time per `attend` in µs, over all copies of the cache in turn."""
    if variant.module.set_threads is not None:
        variant.module.set_threads(1)
    for cache in inputs.caches:
        variant.prepare(cache)
    variant.attend(inputs.q, inputs.caches[-1], sinks=inputs.sinks)
    calls, began = 0, time.thread_time_ns()
    while (taken := time.thread_time_ns() - began) < LEAST_NS or calls % len(inputs.caches):
        variant.attend(inputs.q, inputs.caches[calls % len(inputs.caches)], sinks=inputs.sinks)
        calls += 1
    for cache in inputs.caches:
        variant.release(cache)
    return [taken / calls / 1e3]


if __name__ == "__main__":
    main()
