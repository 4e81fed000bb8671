"""Time of a decode step over the block size N_r, of four formats at short and long lengths. Bytes and quality: cpu_blocks.py.

    python benchmarks/gpu_blocks.py [FORMAT…] [--blocks 64,128] [--rounds 3] [--compile]

A step is `decode`: append, attend, flush, over as many steps as fill a block, so that a time is the mean over all fill levels of the
residual and has its share of packing. For every block the schedules below that are valid are compiled, then timed in turns; the fastest of
each block is verified against the fp64 reference before its row counts. `read_us` is a read of the mean bytes of those steps. Rows go to
$OUT (or benchmarks/results) as GPU_blocks.csv. `--compile` only compiles, without a GPU, into the cache.
Exits with 1 where a schedule does not compile or is wrong.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.common import gpu_facts, gpu_word, parser, take_turns, write_rows
from benchmarks.gpu_words import schedule_word, schedules_of, spec_of, workload_of
from kvgen.errors import CheckError
from kvgen.format.layout import PackedLayout
from kvgen.format.sizes import must_read
from kvgen.lower.backend import get_backend
from kvgen.lower.schedule import Schedule, layout_of
from kvgen.measure.inputs import WorkloadInputs
from kvgen.measure.measurement import TimingPolicy
from kvgen.measure.read_roofline import read_roofline
from kvgen.runtime.calls import Variant
from kvgen.runtime.module import load
from kvgen.spec import KernelSpec, Workload
from kvgen.toolchain import Artifact
from kvgen.toolchain.compile import build_many
from kvgen.verify.check import check

TARGET = "sm90"
POLICY = TimingPolicy(call="decode", seconds=0.03, warmup_seconds=0.01, samples=5)
READ = TimingPolicy(seconds=0.03, warmup_seconds=0.01, samples=10)
FORMATS = {"int4": "k4v4", "kivi-int2": "k2v2:kg32:vg32", "saw-int4": "k4v4:token:krot16u", "e4m3": "ke4m3ve4m3:token"}
"""Groups of 128 tokens leave blocks of 128 and more; of 32, and params per token, any."""
BLOCKS = (32, 64, 96, 128, 192, 256)
WORKLOADS = ("200x316", "4x4096", "8x32768")
SCHEDULES = ("w8u{tile}d{tiles}.cl2", "w4u{tile}d{tiles}c2")
"""For few heads and for many, as the defaults have them."""


def main() -> int:
    """Compile, time, verify and write, format by format."""
    command = parser(__doc__, rounds=3)
    command.add_argument("formats", nargs="*", metavar="FORMAT", help=", ".join(FORMATS))
    command.add_argument("--blocks", type=lambda text: [int(one) for one in text.split(",")], default=list(BLOCKS))
    command.add_argument("--compile", action="store_true")
    options = command.parse_args()
    if unknown := set(options.formats) - set(FORMATS):
        command.error(f"there is no {min(unknown)!r}")
    works = [workload_of(word) for word in WORKLOADS]
    specs = {name: spec_of(FORMATS[name], TARGET, works) for name in options.formats or FORMATS}
    points = {name: schedules(spec, options.blocks) for name, spec in specs.items()}
    modules, failed = compiled(specs, points)
    if options.compile:
        return int(failed)
    rows = list[dict[str, Any]]()
    for name, spec in specs.items():
        variants = {one: Variant(spec, layout_of(spec, one.layout), load(path)) for one, path in modules[name].items()}
        for work in works:
            for row in measure(spec, work, variants, options.rounds):
                rows.append({"format": name, "workload": work.key, **row})
                print(f"{name:10}{work.key:10}{row['block']:5}  {row['schedule']:28}{row['us']:9.2f} µs{row['read_us']:9.2f}", flush=True)
            torch.cuda.empty_cache()
        right = verified(variants, {row["schedule"] for row in rows if row["format"] == name})
        failed = failed or not right.issuperset(row["schedule"] for row in rows if row["format"] == name)
        rows = [row for row in rows if row["format"] != name or row["schedule"] in right]
        write_rows(f"{gpu_word()}_blocks", rows, gpu_facts(POLICY))
    return int(failed)


def compiled(specs: dict[str, KernelSpec], points: dict[str, list[Schedule]]) -> tuple[dict[str, dict[Schedule, Path]], bool]:
    """Modules by format and schedule, and whether one does not compile."""
    every = [(name, schedule) for name, found in points.items() for schedule in found]
    sources = [get_backend("cuda").lower(specs[name], schedule, TARGET) for name, schedule in every]
    modules: dict[str, dict[Schedule, Path]] = {name: {} for name in specs}
    failed = False
    for index, outcome in build_many(sources):
        name, schedule = every[index]
        if isinstance(outcome, Artifact):
            modules[name][schedule] = outcome.path
        else:
            print(f"- {name} {schedule_word(schedule)}: {outcome}", flush=True)
            failed = True
    return modules, failed


def verified(variants: dict[Schedule, Variant], words: set[str]) -> set[str]:
    """Which of these schedules are right; the others are told."""
    right = set()
    for schedule, variant in variants.items():
        word = schedule_word(schedule)
        if word in words and (error := wrong(variant, schedule)) is None:
            right.add(word)
        elif word in words:
            print(f"- {variant.spec.name} {word} is wrong: {error}", flush=True)
    return right


def wrong(variant: Variant, schedule: Schedule) -> CheckError | None:
    """What is wrong with a variant."""
    try:
        check(variant, "cuda", exact=schedule.exact)
    except CheckError as error:
        return error
    return None


def schedules(spec: KernelSpec, blocks: list[int]) -> list[Schedule]:
    """Those that the search space allows. Where codes of 2 bits hide rounding errors, KV tiles are as long as 128 tokens."""
    backend, coarse = get_backend("cuda"), spec.value.bits == 2
    space, found = backend.space(spec, TARGET), list[Schedule]()
    for block in blocks:
        tile = next(tile for tile in (4, 2, 1) if block % (32 * tile) == 0) if coarse else 1
        for word in SCHEDULES:
            chosen = word.format(tile=tile, tiles=4 // tile if coarse else 2) + (".noexact" if coarse else "")
            found += schedules_of(f"n{block}.{chosen}", backend, spec, TARGET)
    return [one for one in found if not space.check(one)]


def measure(spec: KernelSpec, work: Workload, variants: dict[Schedule, Variant], rounds: int) -> list[dict[str, Any]]:
    """A row for each block: its fastest schedule."""
    blocks: dict[int, list[Schedule]] = {}
    for one in sorted(variants, key=lambda one: one.layout.integer("block")):
        blocks.setdefault(one.layout.integer("block"), []).append(one)
    inputs = {block: WorkloadInputs(variants[found[0]], work, "cuda", None, [work.kv_len] * work.batch) for block, found in blocks.items()}
    timers = {one: partial(inputs[block].time, variants[one], POLICY) for block, found in blocks.items() for one in found}
    bytes_of = {block: mean_bytes(spec, variants[found[0]].layout, work) for block, found in blocks.items()}
    times, reads = take_turns(timers, rounds, {size: partial(read_roofline(TARGET).samples, size, READ) for size in bytes_of.values()})
    rows = []
    for block, size in bytes_of.items():
        best = min(blocks[block], key=lambda one: median(times[one]))
        us, read_us = median(times[best]), median(reads[size])
        rows.append({
            "block": block, "schedule": schedule_word(best), "us": round(us, 3), "bytes": size, "read_us": round(read_us, 3),
            "read_fraction": round(read_us / us, 4),
        })  # fmt: skip
    return rows


def mean_bytes(spec: KernelSpec, layout: PackedLayout, work: Workload) -> int:
    """What `attend` must read, over the steps that fill a block."""
    first = max(0, work.kv_len - layout.tokens // 2)
    return work.batch * round(mean(must_read(spec, layout, [first + step]) for step in range(layout.tokens)))


if __name__ == "__main__":
    sys.exit(main())
