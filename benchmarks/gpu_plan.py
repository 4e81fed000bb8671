"""What a plan costs: the kernels that compute a plan and advance lengths, and `attend` with a plan beside the static scheduler.

    python benchmarks/gpu_plan.py [--spec k4v4] [--backend cuda] [--schedule n128.w8u1d2] [--equal 8x8192,…] [--empty 56] [--rounds 9]

Plans are of batches whose lengths differ (log-uniform, 512 to 8K tokens). `attend` is timed at equal lengths (`--equal`), where both
schedulers do the same work, in turns with the read of as many bytes. With `--empty` it is timed with a plan once more, with so many
sequences without tokens beside those of equal lengths. Rows go to $OUT (or benchmarks/results) as GPU_plan.csv.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.command import add_rounds, parser
from benchmarks.gpu_measure import Runner, capture, make_caches, replayed, timed
from benchmarks.gpu_words import schedules_of, spec_of, workload_of
from benchmarks.output import gpu_facts, of_gpu, write_rows
from benchmarks.turns import take_turns
from kvgen.lower.backends import get_backend
from kvgen.lower.schedule import layout_of
from kvgen.measure import read_roofline
from kvgen.measure.job import TimingPolicy
from kvgen.runtime.module import Module, load
from kvgen.runtime.sequences import OverflowFlag
from kvgen.spec import KernelSpec
from kvgen.toolchain import build

BATCHES = (8, 128, 1024)
EQUAL = ("1x4096", "8x8192", "8x32768", "32x8192", "128x8192")
CALLS = 100
POLICY = TimingPolicy(seconds=0.03, warmup_seconds=0.02, samples=10)
Row = dict[str, Any]


def main() -> None:
    """Compile, time, print, write."""
    command = parser(__doc__)
    command.add_argument("--spec", default="k4v4")
    command.add_argument("--backend", choices=["cuda", "tilelang"], default="cuda")
    command.add_argument("--schedule", default="n128.w8u1d2")
    command.add_argument("--equal", type=lambda words: words.split(","), default=EQUAL, metavar="BxL,…", help="workloads of equal lengths")
    command.add_argument("--empty", type=int, default=0, metavar="N", help="sequences without tokens, in a row of their own")
    add_rounds(command)
    options = command.parse_args()
    spec = spec_of(options.spec, "sm90", [workload_of(word) for word in options.equal])
    backend = get_backend(options.backend)
    (schedule,) = schedules_of(options.schedule, backend, spec, "sm90")
    module = load(build(backend.lower(spec, schedule, "sm90")).path)
    read_roofline.read_roofline("sm90")
    rows = [row for batch in BATCHES for row in bookkeeping(module, batch, options.rounds)]
    layout = layout_of(spec, schedule.layout)
    rows += [row for word in options.equal for row in schedulers(spec, module, layout, word, options.empty, options.rounds)]
    for row in rows:
        print(f"{row['kernel']:20}{row['workload']:>10}{row['us']:9.2f} µs {row['read_fraction']}", flush=True)
    what = {"backend": options.backend, "spec": options.spec, "schedule": options.schedule}
    write_rows(of_gpu("plan"), [what | row for row in rows], gpu_facts(POLICY))


def bookkeeping(module: Module, batch: int, rounds: int) -> list[Row]:
    """The plan of a decode step, and the end of the step, for sequences of unequal lengths."""
    random = torch.Generator().manual_seed(batch)
    lengths = (512 * 2 ** (4 * torch.rand(batch, generator=random))).to(torch.int32).cuda()
    room, flag = 1 << 20, OverflowFlag(gpu=True)
    plan = torch.empty(module.plan_size(batch, room, 1), dtype=torch.int32, device="cuda")
    calls = {
        "plan": partial(module.plan, lengths, plan, 1, 1, 1, room, flag.address),
        "advance": partial(module.advance, lengths, None, 1, room, flag.address),
    }
    graphs = {name: capture([call], CALLS) for name, call in calls.items()}
    return [
        {"kernel": name, "workload": f"batch {batch}", "us": round(median(timed(*graph) for _ in range(rounds)), 2), "read_fraction": ""}
        for name, graph in graphs.items()
    ]


def schedulers(spec: KernelSpec, module: Module, layout: Any, word: str, empty: int, rounds: int) -> list[Row]:
    """`attend` at equal lengths: with the static scheduler, with a plan, and with a plan of `empty` sequences more, if there are any."""
    work = workload_of(word)
    caches = make_caches(spec, layout, work, [work.kv_len] * work.batch, 4.0)
    runners = {f"attend, {name}": Runner(spec, module, caches, work, planned=name == "planned") for name in ("static", "planned")}
    if empty:
        more = replace(work, batch=work.batch + empty)
        beside = make_caches(spec, layout, more, [work.kv_len] * work.batch + [0] * empty, 4.0)
        runners[f"attend, {empty} empty"] = Runner(spec, module, beside, more, planned=True)
    graphs = {}
    for name, runner in runners.items():
        if runner.error() > 2e-3:
            raise SystemExit(f"{name} at {word} is wrong")
        graphs[name] = capture([partial(runner.attend, i) for i in range(len(runner.caches.packed))])
    read = partial(read_roofline.read_roofline("sm90").samples, caches.bytes, POLICY)
    samples, reads = take_turns({name: partial(replayed, graph) for name, graph in graphs.items()}, rounds, {caches.bytes: read})
    read_us = median(reads[caches.bytes])
    return [
        {"kernel": name, "workload": word, "us": round(median(us), 2), "read_fraction": round(read_us / median(us), 4)}
        for name, us in samples.items()
    ]


if __name__ == "__main__":
    main()
