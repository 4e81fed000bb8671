"""Decode steps of SmolLM2-135M on a CPU: torch in each dtype, plain and compiled, beside kvgen's quantized weights and caches.

    python benchmarks/cpu_generate.py --threads 2
    python benchmarks/cpu_generate.py --weights int4 --cases 1x256,4x256 --plain

Cases are BATCHxTOKENS. torch's loops have a static cache and SDPA, kvgen's its int8 cache in DecodeLoop; all of them take turns, and a time
is the median of the rounds. Rows go to $OUT (or benchmarks/results) as cpu_generate.csv.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import generate_loops as loops
from benchmarks.common import parser, take_turns, write_rows
from kvgen.accuracy.evaluate import load
from kvgen.bench.run import facts
from kvgen.integrations.transformers import quantize_weights
from kvgen.measure.measurement import TimingPolicy

WEIGHTS: dict[str, dict[str, Any]] = {
    "int4": {"spec": {"bits": 4, "group": 64}, "head": {"bits": 8, "group": 64}},
    "int8": {"spec": {"bits": 8, "group": 64}, "head": {"bits": 8, "group": 64}},
}
CACHE: dict[str, Any] = {
    "arch": "cpu",
    "key": {"bits": 8, "axis": "channel", "group": 64},
    "value": {"bits": 8, "axis": "token", "group": 64},
}
DTYPES = ("float32", "bfloat16")


def main() -> int:
    """Measure, print, write."""
    command = parser(__doc__, rounds=5)
    command.add_argument("--cases", default="1x256", help="BATCHxTOKENS")
    command.add_argument("--weights", default="int4,int8")
    command.add_argument("--dtype", default="float32", choices=DTYPES, help="of the model with quantized weights")
    command.add_argument("--threads", type=int, default=torch.get_num_threads())
    command.add_argument("--steps", type=int, default=10, help="of a turn")
    command.add_argument("--plain", action="store_true", help="compile nothing")
    options = command.parse_args()
    torch.set_num_threads(options.threads)
    subject = load(None, "float32")
    models: dict[str, Any] = {f"torch {dtype}": deepcopy(subject.model).to(getattr(torch, dtype)) for dtype in DTYPES}
    for name in options.weights.split(","):
        models[f"kvgen {name}"] = deepcopy(subject.model).to(getattr(torch, options.dtype))
        quantize_weights(models[f"kvgen {name}"], **WEIGHTS[name])
    rows = []
    for case in options.cases.split(","):
        batch, tokens = map(int, case.split("x"))
        steps = {
            f"{name}{', compiled' if compiled else ''}": step_of(name, model, batch, tokens, compiled, options.dtype)
            for name, model in models.items()
            for compiled in ((False,) if options.plain else (False, True))
        }
        timers = {name: lambda step=step: [loops.milliseconds(step, options.steps, cuda=False)] for name, step in steps.items()}
        found = {name: median(samples) for name, samples in take_turns(timers, options.rounds)[0].items()}
        best = min(ms for name, ms in found.items() if name.startswith("torch"))
        for name, ms in found.items():
            rows.append({"loop": name, "batch": batch, "tokens": tokens, "ms": round(ms, 3), "times_torch": round(best / ms, 3)})
            print(rows[-1], flush=True)
    write_rows("cpu_generate", rows, facts("cpu", TimingPolicy()))
    return 0


def step_of(name: str, model: Any, batch: int, tokens: int, compiled: bool, dtype: str) -> loops.Step:
    """One decode step of a loop, its cache filled."""
    if name.startswith("kvgen"):
        spec = {**CACHE, "attention": {"dtype": dtype}}
        return loops.Packed(model, spec, batch, tokens, compiled={"dynamic": False} if compiled else False).step
    stock = loops.static(model, batch, tokens)
    if compiled:
        stock.model = torch.compile(model, dynamic=False)
    return stock.step


if __name__ == "__main__":
    sys.exit(main())
