"""How far the launches that calls take are from the fastest one of their kernel, at traffic drawn at random.

    python benchmarks/gpu_dispatch.py [SPEC…] [--untuned] [--points 24] [--rounds 3] [--seed 1] [--seconds 300]

Draws batches of 1 to 300 sequences and 30,000 to 900,000 tokens in all, in turns of equal lengths and of log-uniform ones that differ by up
to 64 times, and times all launches of the kernel that `get_kernel` gives, A B C A B C …, with a read of the same bytes. `--untuned`: the
defaults, whatever is registered. Lengths that are unequal have a plan, made before, as all layers of a step share one.

Rows go to $OUT (or benchmarks/results) as GPU_dispatch.csv; the last lines are geometric mean and worst regret of each spec.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.common import gpu_facts, gpu_word, parser, take_turns, write_rows
from kvgen.measure.inputs import NoRoom, WorkloadInputs
from kvgen.measure.measurement import TimingPolicy
from kvgen.measure.read_roofline import read_roofline
from kvgen.registry.entry import Entry
from kvgen.registry.select import Selection, modules, select, serving_entry
from kvgen.runtime.calls import Variant
from kvgen.runtime.module import load
from kvgen.spec import KernelSpec, Workload, load_spec
from kvgen.spec.target import resolve

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SPECS = ("serving_kv8", "serving_kv4", "serving_kv2", "serving_kv4_paged")
POLICY = TimingPolicy(seconds=0.02, warmup_seconds=0.005, samples=5)
BATCHES, TOKENS, SPREAD = (1, 300), (30_000, 900_000), 64


def traffic(seed: int) -> Iterator[list[int]]:
    """Lengths of the sequences of one call after the other, without end."""
    draw = random.Random(seed)
    while True:
        for equal in (True, False):
            batch, tokens = (round(math.exp(draw.uniform(*map(math.log, bounds)))) for bounds in (BATCHES, TOKENS))
            if equal or batch == 1:
                yield [max(1, tokens // batch)] * batch
            else:
                lengths = [math.exp(draw.uniform(0.0, math.log(SPREAD))) for _ in range(batch)]
                yield [max(1, round(tokens * length / sum(lengths))) for length in lengths]


def measured(spec: KernelSpec, entry: Entry, variants: Sequence[Variant], lengths: list[int], rounds: int) -> dict[str, Any] | None:
    """A row: the times of all launches at these lengths; None where the memory cannot hold the caches."""
    work, look_up = Workload(batch=len(lengths), kv_len=max(lengths)), entry.look_up(spec)
    distinct = list(dict.fromkeys(variants))
    try:
        inputs = WorkloadInputs(distinct[0], work, "cuda", None, lengths)
    except NoRoom as error:
        print(f"- {spec.name}: {error}", flush=True)
        return None
    reads = {inputs.nbytes: partial(read_roofline(entry.arch).samples, inputs.nbytes, POLICY)}
    found, read = take_turns({index: partial(inputs.time, one, POLICY) for index, one in enumerate(distinct)}, rounds, reads)
    times = [median(found[index]) for index in range(len(distinct))]
    taken = look_up.launch(len(lengths), max(lengths), 1, sum(lengths))
    us, best = times[distinct.index(variants[taken])], min(times)
    return {
        "spec": spec.name, "tuned": bool(entry.timings), "batch": len(lengths), "longest": max(lengths), "tokens": sum(lengths),
        "equal": len(set(lengths)) == 1, "launch": taken, "us": round(us, 3), "best_us": round(best, 3), "regret": round(us / best, 4),
        "launches": " ".join(f"{one:.3f}" for one in times), "bytes": inputs.nbytes, "read_us": round(median(read[inputs.nbytes]), 3),
    }  # fmt: skip


def main() -> int:
    """Measure, print, write."""
    command = parser(__doc__, rounds=3)
    command.add_argument("specs", nargs="*", default=[str(EXAMPLES / f"{name}.yaml") for name in SPECS], help="spec files")
    command.add_argument("--untuned", action="store_true", help="the defaults, whatever is registered")
    command.add_argument("--points", type=int, default=24, help="calls of each spec")
    command.add_argument("--seed", type=int, default=1)
    command.add_argument("--seconds", type=float, default=300.0, help="after which no call is begun")
    options = command.parse_args()
    until, rows = time.monotonic() + options.seconds, list[dict[str, Any]]()
    for file in options.specs:
        spec = load_spec(Path(file))
        target = resolve(spec.arch)
        entry, _ = serving_entry(spec, target, Selection(None, "default", ()) if options.untuned else select(spec, target))
        variants = [Variant(spec, entry.packed, load(path)) for path in modules(entry)]
        for lengths, _ in zip(traffic(options.seed), range(options.points), strict=False):
            if time.monotonic() > until:
                break
            row = measured(spec, entry, variants, lengths, options.rounds)
            torch.cuda.empty_cache()
            if row is not None:
                rows.append(row)
                write_rows(f"{gpu_word()}_dispatch{'_untuned' if options.untuned else ''}", rows, gpu_facts(POLICY))
                print(f"{spec.name:20} {row['batch']:4} x {row['longest']:7} {row['us']:9.2f} µs  regret {row['regret']:.3f}", flush=True)
    for name in dict.fromkeys(str(row["spec"]) for row in rows):
        mine = [row for row in rows if row["spec"] == name]
        worst = max(mine, key=lambda row: row["regret"])
        mean = geometric_mean(row["regret"] for row in mine)
        print(
            f"{name:20} {len(mine)} calls: geometric mean {mean:.4f}, worst {worst['regret']:.3f} ({worst['batch']} x {worst['longest']})"
        )
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
