"""Attention of many query tokens over a paged cache that holds them, beside torch's kernels over 16-bit K and V of the same lengths.

    python benchmarks/gpu_extend.py [CASE…] [--specs k4v4:token:page16:arrival:krot16u:q8,k4v4:page128:q8] [--rounds 5]

Cases are SEQUENCESxQUERIESxTOKENS, queries being the last of the tokens. `kvgen` is what `PagedCalls.attend` does in a layer, with the
pieces of rows that all layers of a step have in common; `passes` are those of the kernel over them, `dequantized` is flash attention over
what is unpacked. They take turns, as do torch's (flash attention: causal by varlen, and not causal, by which it splits K and V; cuDNN, not
causal), captured in CUDA graphs, over caches that L2 does not hold. `torch_us` is the fastest of torch's, `ratio` kvgen's time over it.
Rows go to $OUT (or benchmarks/results) as GPU_extend.csv. Exits with 1 where routes differ from each other by more than one part in a
hundred.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.common import gpu_facts, gpu_word, parser, take_turns, write_rows
from benchmarks.gpu_words import spec_of, workload_of
from kvgen.api import get_kernel
from kvgen.measure.measurement import TimingPolicy
from kvgen.measure.timer import CudaTimer
from kvgen.runtime import chunks, extend, varlen
from kvgen.runtime.calls import Calls
from kvgen.runtime.paged import PagedCalls, Rows

CASES = ("16x16x2048", "16x32x2048", "8x8x32768", "4x64x8192", "1x128x32768", "8x512x8192")
SPECS = "k4v4:token:page16:arrival:krot16u:q8,k4v4:page128:q8"
POLICY = TimingPolicy(seconds=0.02, warmup_seconds=0.01, samples=6)
COLD = 256 << 20
"""Bytes of the caches that take turns."""
Call = Callable[[], object]


def main() -> int:
    """Compile, then case by case compare and time."""
    command = parser(__doc__, rounds=5)
    command.add_argument("cases", nargs="*", metavar="CASE", default=CASES)
    command.add_argument("--specs", default=SPECS)
    options = command.parse_args()
    words, good, rows = options.specs.split(","), True, list[dict[str, Any]]()
    with ThreadPoolExecutor() as pool:
        kernels = dict(zip(words, pool.map(lambda word: get_kernel(spec_of(word, "sm90", [workload_of("8x8192")])), words), strict=True))
    for case in options.cases or CASES:
        shape = tuple(map(int, case.split("x")))
        torch_us = timed(torchs(*shape, kernels[words[0]]), options.rounds)
        best = min(torch_us, key=torch_us.__getitem__)
        for word in words:
            routes, error = routes_of(kernels[word], *shape)
            us, good = timed(routes, options.rounds), good and error < 1e-2
            ratio = us["kvgen"] / torch_us[best]
            found = {f"{name}_us": round(time, 1) for name, time in us.items()} | {"torch_us": round(torch_us[best], 1)}
            rows.append({"spec": word, "case": case, **found, "torch": best, "ratio": round(ratio, 3), "difference": f"{error:.1e}"})
            print(
                f"{case:12} {word:38} {best:6} {ratio:5.2f} {error:7.0e}", *(f"{name} {time}" for name, time in found.items()), flush=True
            )
        write_rows(f"{gpu_word()}_extend", rows, gpu_facts(POLICY))
        torch.cuda.empty_cache()
    return 0 if good else 1


def timed(turns: dict[str, list[Call]], rounds: int) -> dict[str, float]:
    """µs of each."""
    timer = CudaTimer()
    samples, _ = take_turns({name: partial(timer.time, calls, POLICY) for name, calls in turns.items()}, rounds)
    return {name: median(found) for name, found in samples.items()}


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers of a seed."""
    return torch.randn(shape, dtype=dtype, device="cuda", generator=torch.Generator("cuda").manual_seed(len(shape)))


def routes_of(kernel: Calls, batch: int, queries: int, tokens: int) -> tuple[dict[str, list[Call]], float]:
    """Calls of each route over caches that take turns, and by how much their outputs differ."""
    a, page = kernel.spec.attention, kernel.spec.cache.page or 0
    calls, per = PagedCalls(kernel, batch, tokens, "cuda"), -(-tokens // page)
    table = torch.randperm(batch * per, device="cuda").int().view(batch, per)
    copies = max(1, min(8, COLD // (batch * per * page * kernel.layout.block_bytes // kernel.layout.tokens * a.kv_heads)))
    zeros = torch.zeros(batch, dtype=torch.int32, device="cuda")
    before, after = Rows(zeros, table), Rows(zeros + tokens, table)
    k, v = (normal(batch * tokens, a.kv_heads, a.head_dim, dtype=kernel.dtype) for _ in range(2))
    stores = [calls.new_store(batch * per, batch) for _ in range(copies)]
    for store in stores:
        calls.pack(k, v, zeros + tokens, store, before, [tokens * b for b in range(batch + 1)])
    q = normal(batch * queries, a.q_heads, a.head_dim, dtype=kernel.dtype)
    outs, pieces, starts, bounds = {}, {}, [queries * b for b in range(batch + 1)], [tokens] * batch

    def attend(name: str, passes: int, store: Any) -> None:
        chunks.PASSES, usual = passes, chunks.PASSES
        if name not in pieces:
            pieces[name] = calls.pieces(after, starts, bounds=bounds)
        calls.attend(q, outs[name], store, after, starts, bounds=bounds, pieces=pieces[name])
        chunks.PASSES = usual

    names = {"kvgen": chunks.PASSES}
    if queries > calls.most_q and calls._chunks is not None:
        names |= {"passes": 1 << 30, "dequantized": 0}
    for name, passes in names.items():
        outs[name] = torch.full_like(q, torch.nan)
        attend(name, passes, stores[0])
    want = outs["kvgen"].float()
    error = max(float((out.float() - want).norm() / want.norm()) for out in outs.values())
    return {name: [partial(attend, name, passes, store) for store in stores] for name, passes in names.items()}, error


def torchs(batch: int, queries: int, tokens: int, like: Calls) -> dict[str, list[Call]]:
    """torch's kernels over 16-bit tensors, each laid out as it likes them."""
    a = like.spec.attention
    copies = max(1, min(8, COLD // (batch * tokens * a.kv_heads * a.head_dim * 4)))
    q = normal(batch, queries, a.q_heads, a.head_dim, dtype=like.dtype)
    held = [[normal(batch, a.kv_heads, tokens, a.head_dim, dtype=like.dtype).transpose(1, 2) for _ in range(2)] for _ in range(copies)]
    starts = [torch.arange(0, batch * n + 1, n, dtype=torch.int32, device="cuda") for n in (queries, tokens)]
    packed = [[x.flatten(0, 1) if batch == 1 else x.contiguous().flatten(0, 1) for x in pair] for pair in held]

    def causal(k: Tensor, v: Tensor) -> object:
        return varlen.torch_flash(q.flatten(0, 1), k, v, *starts, queries, tokens, like.scale, True, None)

    def flash(k: Tensor, v: Tensor) -> object:
        return torch.ops.aten._flash_attention_forward(q, k, v, None, None, queries, tokens, 0.0, False, False, scale=like.scale)

    def turns(call: Callable[[Tensor, Tensor], object], of: Iterable[list[Tensor]]) -> list[Call]:
        return [partial(call, *pair) for pair in of]

    found = {"varlen": turns(causal, packed), "flash": turns(flash, held)}
    if extend.dense_fits(q):
        found["cudnn"] = turns(lambda k, v: extend.dense(q, k, v, like.scale), held)
    return found


if __name__ == "__main__":
    sys.exit(main())
