"""Speed of packing whole prefills beside a copy that moves as many bytes, on this GPU.

    python benchmarks/gpu_pack.py k4v4,k8v8,k2v2:token 8x32768,1x131072

Words are those of gpu_words.py. Results also go to $OUT (or benchmarks/results) as gpu_pack.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.command import parser
from benchmarks.compiling import default_variant
from benchmarks.gpu_words import spec_of, workload_of
from benchmarks.output import write_json
from kvgen.measure import read_roofline
from kvgen.measure.device import cold_bytes
from kvgen.measure.job import TimingPolicy
from kvgen.measure.timer import CudaTimer
from kvgen.runtime.module import load_library
from kvgen.runtime.variant import Variant
from kvgen.spec import Workload

PIECE = read_roofline.PIECE


def main() -> int:
    """Measure and print."""
    command = parser(__doc__)
    command.add_argument("specs")
    command.add_argument("workloads", nargs="?", default="8x32768,1x131072,32x2048,1x4096")
    options = command.parse_args()
    copy = load_library(read_roofline.artifact("sm90").path).get_function("copy")
    rows = []
    print(f"{'spec':20} {'workload':>12} {'µs':>9} {'TB/s':>6} {'copy µs':>9} {'fraction':>8}")
    for words in options.specs.split(","):
        for word in options.workloads.split(","):
            row = measure(words, workload_of(word), copy)
            rows.append(row)
            print(f"{words:20} {word:>12} {row['us']:9.1f} {row['tb_s']:6.2f} {row['copy_us']:9.1f} {row['fraction']:8.3f}", flush=True)
    write_json("gpu_pack", rows)
    return 0


def measure(words: str, work: Workload, copy: Callable[..., object]) -> dict[str, Any]:
    """One spec and workload: µs of packing, and of a copy that reads and writes as many bytes together."""
    spec = spec_of(words, "sm90", [work])
    variant = default_variant(spec)
    layout = variant.layout
    heads, dim, length = spec.attention.kv_heads, spec.attention.head_dim, work.kv_len
    read = 2 * work.batch * length * heads * dim * 2
    blocks = work.batch * heads * (length // layout.tokens)
    rest = 2 * work.batch * (length % layout.tokens) * heads * dim * 2
    moved = read + blocks * layout.payload_bytes + rest
    calls = []
    for seed in range(max(1, -(-cold_bytes("cuda") // moved))):
        random = torch.Generator("cuda").manual_seed(seed)
        k, v = (torch.randn(work.batch, length, heads, dim, generator=random, device="cuda").to(variant.dtype) for _ in range(2))
        calls.append(
            partial(
                pack,
                variant,
                variant.new_cache(work.batch, length, "cuda"),
                k,
                v,
                torch.full((work.batch,), length, dtype=torch.int32, device="cuda"),
            )
        )
    policy = TimingPolicy()
    us = median(CudaTimer().time(calls, policy))
    copy_us = copied_us(copy, moved // 2, policy)
    return {
        "spec": words, "batch": work.batch, "kv_len": length, "us": us, "bytes": moved, "tb_s": moved / us / 1e6,
        "copy_us": copy_us, "fraction": copy_us / us,
    }  # fmt: skip


def pack(variant: Variant, cache: Any, k: torch.Tensor, v: torch.Tensor, new: torch.Tensor) -> None:
    """Fill an empty cache; its lengths go back to zero."""
    variant.module.pack(k, v, new, *cache.tensors, cache.max_len, cache.sequences.overflow.address, 1)
    cache.lengths.zero_()


def copied_us(copy: Callable[..., object], size: int, policy: TimingPolicy) -> float:
    """Median µs of the faster of our copy and the driver's of `size` bytes (rounded up to whole pieces)."""
    size = -(-size // PIECE) * PIECE
    pairs = [torch.zeros(2, size, dtype=torch.uint8, device="cuda") for _ in range(max(1, -(-cold_bytes("cuda") // (2 * size))))]
    ours = [partial(copy, pair[0], pair[1]) for pair in pairs]
    drivers = [partial(pair[1].copy_, pair[0]) for pair in pairs]
    return min(median(CudaTimer().time(calls, policy)) for calls in (ours, drivers))


if __name__ == "__main__":
    sys.exit(main())
