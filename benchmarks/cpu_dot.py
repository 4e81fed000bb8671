"""Products of floats and of 16-bit integers (`dot`) on this CPU, in turns in one process: Llama-3.1-8B's heads, 8, 4 and 2 bits.

    python -m benchmarks.cpu_dot [--threads 1] [--rounds 15] [--no-write]

Each takes the fastest of a few launches. Writes benchmarks/results/cpu_dot.csv.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from benchmarks import output
from benchmarks.command import parser, processors
from benchmarks.cpu_llama31 import BITS, spec_of
from benchmarks.turns import take_turns
from kvgen.cli.bench import facts, pin_threads
from kvgen.lower.schedule import Params, Schedule
from kvgen.spec import KernelSpec, Workload

DOTS = ("fp32", "int16")
TILES = ((4, 4, 4), (4, 4, 8), (2, 2, 4))
"""key_tiles, value_tiles, prefetch."""
BLOCK = Params(block=128, order="simd")


def main() -> None:
    """Compile, time, print, write."""
    pin_threads()
    from kvgen.measure.job import TimingPolicy

    command = parser(__doc__)
    command.add_argument("--threads", type=int, default=processors())
    command.add_argument("--rounds", type=int, default=15)
    command.add_argument("--no-write", action="store_true")
    options = command.parse_args()
    policy = TimingPolicy(seconds=0.06, warmup_seconds=0.02, samples=15, threads=options.threads)
    rows = [row for bits in BITS for work in spec_of(bits).workloads for row in compared(spec_of(bits), work, policy, options.rounds)]
    if not options.no_write:
        told = {name: fact for name, fact in facts("cpu", policy).items() if name not in ("driver", "load")} | {"threads": options.threads}
        output.write_csv(output.folder() / "cpu_dot.csv", [{**row, **told} for row in rows])


def launches(dot: str) -> Iterable[Params]:
    """Four query rows at a time, as a KV head has."""
    for key_tiles, value_tiles, prefetch in TILES:
        yield Params(dot=dot, rows=4, key_tiles=key_tiles, value_tiles=value_tiles, chunk=128, split_tokens=4096, prefetch=prefetch)


def compared(spec: KernelSpec, work: Workload, policy: Any, rounds: int) -> list[dict[str, Any]]:
    """A row of each `dot` at a workload: its fastest launch, beside the read of as many bytes."""
    from kvgen.lower.backends import get_backend
    from kvgen.lower.schedule import layout_of
    from kvgen.measure.inputs import WorkloadInputs
    from kvgen.measure.read_roofline import read_us
    from kvgen.runtime.module import load
    from kvgen.runtime.variant import Variant
    from kvgen.toolchain import build

    backend, layout = get_backend("cpu"), layout_of(spec, BLOCK)
    variants = {
        launch: Variant(spec, layout, load(build(backend.lower(spec, Schedule("cpu", BLOCK, launch), "cpu")).path))
        for dot in DOTS
        for launch in launches(dot)
    }
    inputs = WorkloadInputs(next(iter(variants.values())), work, "cpu")
    timers = {launch: lambda v=v: inputs.time(v, policy) for launch, v in variants.items()}
    samples, reads = take_turns(timers, rounds, {inputs.nbytes: lambda: [read_us("cpu", inputs.nbytes, policy)]})
    read, times = median(reads[inputs.nbytes]), {launch: median(found) for launch, found in samples.items()}
    rows = []
    for dot in DOTS:
        best = min((launch for launch in times if launch["dot"] == dot), key=times.__getitem__)
        us = times[best]
        launch = f"{best['key_tiles']}/{best['value_tiles']}, {best['prefetch']}"
        row = {"spec": spec.name, "batch": work.batch, "kv_len": work.kv_len, "dot": dot, "tiles, prefetch": launch, "us": round(us, 1)}
        rows.append({**row, "bytes": inputs.nbytes, "read_us": round(read, 1), "read_fraction": round(read / us, 3)})
        print(f"{spec.name:18}{work.key:>14}  {dot:6} {us:9.0f} µs  {read / us:.2f} of the read", flush=True)
    return rows


if __name__ == "__main__":
    main()
