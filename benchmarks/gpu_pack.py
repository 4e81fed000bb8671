"""Packing against copying: µs of `pack` of whole prompts, and the share of the bandwidth that a copy reaches.

    python benchmarks/gpu_pack.py k4v4,k8v8,k2v2:bf16 8x8192,1x131072

Bytes of packing are those of K and V read and of blocks written; a copy moves as many, half of them each way.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.gpu_measure import capture, timed
from benchmarks.gpu_words import workload_of
from tests.support.points import Point, compile_points, variant

ROUNDS = 9
COLD_BYTES = 192 << 20


def measure(point: Point, batch: int, tokens: int) -> dict[str, object]:
    """One row: a prompt of `tokens` for each of `batch` sequences into an empty cache."""
    v = variant(point)
    a = v.spec.attention
    tokens = tokens // v.layout.tokens * v.layout.tokens
    cache = v.new_cache(batch, tokens, "cuda")
    shape = (batch, tokens, a.kv_heads, a.head_dim)
    nbytes = 2 * batch * tokens * a.kv_heads * a.head_dim * 2 + batch * a.kv_heads * (tokens // v.layout.tokens) * v.layout.block_bytes
    count = max(1, -(-COLD_BYTES // nbytes))
    inputs = [[torch.randn(shape, device="cuda", dtype=v.dtype) for _ in range(2)] for _ in range(count)]
    new = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")

    def pack(k: torch.Tensor, x: torch.Tensor) -> None:
        cache.lengths.zero_()
        v.module.pack(k, x, new, cache.packed, cache.k_residual, cache.v_residual, cache.lengths, cache.block_table)

    source = torch.empty(count, nbytes // 2, dtype=torch.uint8, device="cuda").random_(255)
    target = torch.empty_like(source)
    packs = capture([lambda k=k, x=x: pack(k, x) for k, x in inputs], 8)  # type: ignore[misc]
    copies = capture([lambda i=i: target[i].copy_(source[i]) for i in range(count)], 8)  # type: ignore[misc]
    samples = [(timed(*packs), timed(*copies)) for _ in range(ROUNDS)]
    us, copy_us = (median(times) for times in zip(*samples, strict=True))
    return {
        "spec": point.words, "batch": batch, "tokens": tokens, "us": us, "bytes": nbytes, "tb_s": nbytes / us * 1e-6,
        "copy_us": copy_us, "copy_fraction": copy_us / us,
    }  # fmt: skip


def main() -> None:
    """Print a table; JSON to $OUT or benchmarks/results."""
    points = [Point(words) for words in sys.argv[1].split(",")]
    compile_points(points)
    rows = []
    for point in points:
        for word in sys.argv[2].split(","):
            work = workload_of(word)
            row = measure(point, work.batch, work.kv_len)
            rows.append(row)
            print(
                "{spec:20} {batch:>4}x{tokens:<7} {us:9.1f} us {tb_s:5.2f} TB/s  {copy_fraction:5.3f} of a copy".format(**row), flush=True
            )
    out = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu_pack.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
