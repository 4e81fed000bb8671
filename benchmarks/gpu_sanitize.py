"""A few calls of each of a covering set of variants, to be run under compute-sanitizer.

    python benchmarks/gpu_sanitize.py --compile                      # fills the cache, without a sanitizer
    compute-sanitizer --tool memcheck  python benchmarks/gpu_sanitize.py
    compute-sanitizer --tool racecheck python benchmarks/gpu_sanitize.py
    compute-sanitizer --tool racecheck python benchmarks/gpu_sanitize.py --part 2/3     # every third variant, the second on, beside others

torch is used for memory only; every kernel launched is a module's own.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.command import parser
from tests.support.kernel_cases import Compilation, KernelCase, variant

KERNEL_CASES = (
    KernelCase("k4v4"), KernelCase("k4v4", "w8u4d1.tile"), KernelCase("k8v8", "w8u1d2.bulk"), KernelCase("k2v2", "w8u4d1.cl8"),
    KernelCase("k2v2", "w8u4d1"), KernelCase("k4v4:token:kg32:vg32:page64"), KernelCase("k4v4:bf16:q4:page128"),
    KernelCase("k4v4:d64:h5/1"),
    KernelCase("k8v8:d256"), KernelCase("k16v4:h16/1"), KernelCase("k4v4", "w4u4d1c2"), KernelCase("k8v8:page128", "w8u2d1.cl2"),
    KernelCase("k4v4:page128", "w8u4d1.bulk.cl2"), KernelCase("k4v4", "w2u4d1c4.noexact"), KernelCase("k8v8:vchannel"),
    KernelCase("k4v4:d80:h7/1"), KernelCase("k4v4:q8"), KernelCase("k4v4:window256:cap50:sinks"), KernelCase("k16v16:rollback4"),
    KernelCase("k2v2:boost1/8:sink32:local128:page128"), KernelCase("k2v2", "w4u4d1c2.noexact"),
    KernelCase("k4v4", "default", "sm90", "tilelang"), KernelCase("k2v2:sink16:local64:page128", "default", "sm90", "tilelang"),
)  # fmt: skip
SIMILAR, UNEQUAL = (0, 1, 127, 128, 300), (2400, 0, 1, 128, 300, 127)
"""Lengths of similar and of very different size."""
STEPS = 3


def live(case: KernelCase, lengths: tuple[int, ...]) -> None:
    """Prefill, attend, decode over a flush, unpack."""
    v = variant(case)
    a = v.spec.attention
    cache = v.new_cache(len(lengths), max(lengths) + STEPS * a.q_len, "cuda")
    k, x = (torch.ones(len(lengths), max(lengths), a.kv_heads, a.head_dim, dtype=v.dtype, device="cuda") for _ in range(2))
    v.prefill(cache, k, x, lengths)
    q = torch.ones(len(lengths), a.q_len, a.q_heads, a.head_dim, dtype=v.dtype, device="cuda")
    sinks = torch.zeros(a.q_heads, device="cuda") if a.sinks else None
    v.attend(q, cache, lse=True, sinks=sinks)
    for _ in range(STEPS):
        v.decode(q, k[:, : a.q_len], x[:, : a.q_len], cache, sinks=sinks)
    v.unpack(cache)
    torch.cuda.synchronize()
    print(case, "done", flush=True)


def main() -> None:
    """Compile, then live every chosen variant over both kinds of lengths."""
    command = parser(__doc__)
    command.add_argument("--compile", action="store_true", help="run nothing")
    command.add_argument("--part", default="1/1", metavar="K/N", help="every N-th variant, from the K-th on")
    options = command.parse_args()
    first, step = map(int, options.part.split("/"))
    cases = KERNEL_CASES[first - 1 :: step]
    compilation = Compilation(cases)
    compilation.wait()
    compilation.close()
    if not options.compile:
        for case in cases:
            for lengths in (SIMILAR, UNEQUAL):
                live(case, lengths)
        print(f"{len(cases)} variants", flush=True)


if __name__ == "__main__":
    main()
