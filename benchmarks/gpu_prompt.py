"""Prompts over a quantized cache beside dequantizing it and calling torch SDPA, every kernel of it, in one process.

    python benchmarks/gpu_prompt.py [SPECS] [WORKLOADS]        e.g.  k4v4,k8v8:bf16 8x8192q512,1x32768q4096

Words are those of gpu_words.py; the spec's own q_len stays 1. Rows go to $OUT (or benchmarks/results) as GPU_prompt.csv. The other side
dequantizes into tensors that it already has; `split` is cuDNN without a mask over what lies before the prompt, causal over the
prompt itself, both merged by their LSE. `new length` is the first call at a length, which cuDNN plans for; the host's clock, to the end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.command import parser
from benchmarks.compiling import default_variant
from benchmarks.gpu_words import spec_of, workload_of
from benchmarks.output import gpu_facts, of_gpu, write_rows
from benchmarks.turns import take_turns
from kvgen.measure.job import TimingPolicy
from kvgen.reference.attention import attend as reference
from kvgen.reference.tolerance import relative_l2
from kvgen.runtime import extend
from kvgen.runtime.kvcache import KVCache
from kvgen.runtime.variant import Variant
from kvgen.spec import Workload

ROUNDS = 3
CALLS = 5
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Problem:
    """A filled cache and a prompt: q [batch, q_len, q_heads, head_dim]."""

    variant: Variant
    cache: KVCache
    q: torch.Tensor
    work: Workload

    @property
    def length(self) -> int:
        """Tokens of every sequence, the prompt's included."""
        return self.cache.bound

    @property
    def flops(self) -> float:
        """Of both products, the causal half of the prompt's own square left out."""
        batch, tokens, heads, dim = self.q.shape
        seen = tokens * (self.length - tokens) + tokens * (tokens + 1) / 2
        return 4.0 * batch * heads * dim * seen


def main() -> int:
    """Measure, print, write."""
    command = parser(__doc__)
    command.add_argument("specs", nargs="?", default="k4v4,k8v8:bf16")
    command.add_argument("workloads", nargs="?", default=",".join(f"{w}q{q}" for w in ("8x8192", "1x32768") for q in (512, 2048, 4096)))
    options = command.parse_args()
    rows: list[dict[str, Any]] = []
    for words in options.specs.split(","):
        variant = compiled(words)
        for word in options.workloads.split(","):
            rows += measure(words, problem(variant, workload_of(word)))
    write_rows(of_gpu("prompt"), rows, gpu_facts(TimingPolicy(), "call"))
    return 0


def compiled(words: str) -> Variant:
    """The default schedule of a spec."""
    return default_variant(spec_of(words, "sm90", [Workload(batch=1, kv_len=32768)]))


def problem(variant: Variant, work: Workload) -> Problem:
    """Normal numbers; the residual is half full."""
    a = variant.spec.attention
    length = work.kv_len - variant.layout.tokens // 2
    random = torch.Generator("cuda").manual_seed(work.kv_len + work.q_len)

    def normal(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(work.batch, tokens, heads, a.head_dim, generator=random, device="cuda").to(variant.dtype)

    cache = variant.new_cache(work.batch, work.kv_len + ROUNDS * extend.PLANNED, "cuda")
    variant.prefill(cache, normal(length, a.kv_heads), normal(length, a.kv_heads))
    return Problem(variant, cache, normal(work.q_len, a.q_heads), work)


def measure(words: str, p: Problem) -> list[dict[str, Any]]:
    """Rows of one workload, everybody taking turns."""
    shape = (p.work.batch, p.length, p.cache.packed.shape[1], p.q.shape[3])
    k, v = (torch.empty(shape[0], shape[2], shape[1], shape[3], dtype=p.q.dtype, device="cuda").transpose(1, 2) for _ in range(2))
    out = torch.empty_like(p.q)
    unpack = partial(p.variant.unpack, p.cache, k, v)
    calls: dict[tuple[str, str], Callable[[], object]] = {
        ("kvgen", "attend"): partial(p.variant.attend, p.q, p.cache, out=out),
        ("kvgen", "captured"): partial(captured, p, out),
        ("kvgen", "unpack"): unpack,
    }
    unpack()
    want = reference(p.q[:1], k[:1], v[:1])[0]
    errors = {("kvgen", "unpack"): 0.0}
    for name, attention in flavours(p.length).items():
        call = partial(whole, unpack, attention, p.q, k, v)
        try:
            errors["torch", name] = relative_l2(call()[:1], want)
        except RuntimeError as error:
            print(f"  {name}: {str(error).strip().splitlines()[0][:150]}", flush=True)
            continue
        calls["torch", name] = call
    calls["kvgen", "attend"]()
    errors["kvgen", "attend"] = relative_l2(out[:1], want)
    calls["kvgen", "captured"]()
    errors["kvgen", "captured"] = relative_l2(out[:1], want)
    samples, _ = take_turns({key: partial(timed, run) for key, run in calls.items()}, ROUNDS)
    times = {key: median(found) for key, found in samples.items()}
    best = min(us for (provider, _), us in times.items() if provider == "torch")
    times["kvgen", "new length"], errors["kvgen", "new length"] = new_length(p, out), 0.0
    print(f"{words} {p.work.batch}x{p.work.kv_len}q{p.work.q_len}: best of torch {best:.0f} µs", flush=True)
    for key, us in times.items():
        speed = p.flops / us / 1e6
        print(f"  {' '.join(key):22}{us:9.1f} µs  {best / us:5.2f}x  {speed:6.0f} TFLOP/s  {errors[key]:.1e}", flush=True)
    return [
        {
            "provider": provider, "what": name, "spec": words, "batch": p.work.batch, "kv_len": p.work.kv_len, "q_len": p.work.q_len,
            "us": round(us, 1), "best_torch_us": round(best, 1), "speedup": round(best / us, 3),
            "tflops": 0.0 if name in ("unpack", "new length") else round(p.flops / us / 1e6, 1), "relative_l2": errors[provider, name],
        }
        for (provider, name), us in times.items()
    ]  # fmt: skip


def captured(p: Problem, out: torch.Tensor) -> None:
    """`attend` as it is while a graph is captured: flash attention does everything."""
    step, extend.PREFIX_STEP = extend.PREFIX_STEP, 1 << 30
    p.variant.attend(p.q, p.cache, out=out)
    extend.PREFIX_STEP = step


def new_length(p: Problem, out: torch.Tensor) -> float:
    """µs of `attend` where the cache is longer than ever before, by as little as cuDNN is asked to plan for."""
    tokens = torch.randn(p.work.batch, extend.PLANNED, p.variant.spec.attention.kv_heads, p.q.shape[3], device="cuda").to(p.q.dtype)
    found = []
    for _ in range(ROUNDS):
        p.variant.prefill(p.cache, tokens, tokens)
        torch.cuda.synchronize()
        started = time.perf_counter()
        p.variant.attend(p.q, p.cache, out=out)
        torch.cuda.synchronize()
        found.append((time.perf_counter() - started) * 1e6)
    return median(found)


def timed(run: Callable[[], object]) -> list[float]:
    """µs of calls, one behind the other as a program would make them."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS + 1)]  # type: ignore[no-untyped-call]
    run()
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [one.elapsed_time(other) * 1e3 for one, other in pairwise(marks)]


def whole(unpack: Callable[[], object], attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Dequantize, attend: [batch, q_len, q_heads, head_dim]."""
    unpack()
    return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def flavours(length: int) -> dict[str, Attention]:
    """Ways to ask torch for attention aligned to the end: q [batch, q_heads, q_len, head_dim], k and v [batch, kv_heads, ...]."""

    def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa(q, k, v, attn_mask=causal_lower_right(q.shape[2], length), enable_gqa=True)

    def masked(kernel: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(q.shape[2], length, dtype=torch.bool, device=q.device).tril(length - q.shape[2])
        with sdpa_kernel([kernel]):
            return sdpa(q, k, v, attn_mask=mask, enable_gqa=kernel != SDPBackend.EFFICIENT_ATTENTION)

    def efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        return masked(SDPBackend.EFFICIENT_ATTENTION, q, k, v)

    return {"flash": flash, "cudnn-mask": partial(masked, SDPBackend.CUDNN_ATTENTION), "efficient-mask": efficient, "cudnn-split": split}


def split(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Two calls of cuDNN, merged."""
    past, run = k.shape[2] - q.shape[2], torch.ops.aten._scaled_dot_product_cudnn_attention
    old, old_lse = run(q, k[:, :, :past], v[:, :, :past], None, True, 0.0, False, False)[:2]
    own, own_lse = run(q, k[:, :, past:], v[:, :, past:], None, True, 0.0, True, False)[:2]
    weight = torch.sigmoid(old_lse.reshape(q.shape[:3]) - own_lse.reshape(q.shape[:3])).unsqueeze(-1)
    return torch.lerp(own.float(), old.float(), weight).to(q.dtype)


if __name__ == "__main__":
    sys.exit(main())
