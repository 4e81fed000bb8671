"""What a decode step pays once for all layers: the kernel that computes a plan, and the one that advances the lengths.

    python benchmarks/gpu_plan.py [--spec k4v4] [--rounds 9]

Lengths are log-uniform, 512 to 8K tokens. Rows go to $OUT (or benchmarks/results) as GPU_plan.csv.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.common import gpu_facts, gpu_word, parser, take_turns, write_rows
from benchmarks.gpu_words import spec_of, workload_of
from kvgen.lower.backend import get_backend
from kvgen.measure.measurement import TimingPolicy
from kvgen.measure.timer import CudaTimer
from kvgen.runtime.module import load
from kvgen.runtime.sequences import OverflowFlag
from kvgen.toolchain import build

BATCHES = (8, 128, 1024)
ROOM = 1 << 20
POLICY = TimingPolicy(seconds=0.03, warmup_seconds=0.02, samples=10)


def main() -> None:
    """Compile the default launch, time, print, write."""
    command = parser(__doc__)
    command.add_argument("--spec", default="k4v4")
    options = command.parse_args()
    spec, backend = spec_of(options.spec, "sm90", [workload_of("32x8192")]), get_backend("cuda")
    module = load(build(backend.lower(spec, backend.default(spec, "sm90"), "sm90")).path)
    flag, timer, rows = OverflowFlag(gpu=True), CudaTimer(), list[dict[str, Any]]()
    for batch in BATCHES:
        draw = torch.rand(batch, generator=torch.Generator().manual_seed(batch))
        lengths = (512 * 2 ** (4 * draw)).to(torch.int32).cuda()
        plan = torch.empty(module.plan_size(batch, ROOM, 1), dtype=torch.int32, device="cuda")
        calls = {
            "plan": partial(module.plan, lengths, plan, 1, 1, 1, ROOM, flag.address),
            "advance": partial(module.advance, lengths, None, 1, ROOM, flag.address),
        }
        samples, _ = take_turns({name: partial(timer.time, [call], POLICY) for name, call in calls.items()}, options.rounds)
        for name, us in samples.items():
            rows.append({"spec": options.spec, "kernel": name, "batch": batch, "us": round(median(us), 2)})
            print(f"{name:10}{batch:6}{median(us):8.2f} µs", flush=True)
    write_rows(f"{gpu_word()}_plan", rows, gpu_facts(POLICY))


if __name__ == "__main__":
    main()
