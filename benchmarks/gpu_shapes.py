"""Every shape and cache beside the plain one: how far each is from a read of its bytes, from its sibling, and from torch SDPA.

    python benchmarks/gpu_shapes.py [CASE…] [--rounds 9] [--no-torch]

Compiles a few schedules per shape in parallel, verifies and times them in this process, keeps the fastest right one. A case's sibling
has the same bytes in a plainer shape. torch's time is that of its fastest 16-bit kernel for the same attention; for a ragged batch,
the faster of one call per length and of its kernel for packed sequences. Rows go to $OUT (or benchmarks/results) as h200_shapes.csv.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.gpu_measure import Caches, Runner, capture, make_caches, timed
from benchmarks.gpu_results import write_rows
from benchmarks.gpu_words import lengths_of, schedule_word, schedules_of, spec_of, workload_of
from kvgen.bench.case import Case
from kvgen.bench.torch_sdpa import cuda_providers
from kvgen.cli.bench import facts
from kvgen.errors import CompileError, KvgenError, UnsupportedError
from kvgen.lower.backends import get_backend
from kvgen.lower.base import Source
from kvgen.measure import yardstick
from kvgen.measure.bytes import half_full
from kvgen.measure.job import TimingPolicy
from kvgen.measure.timer import CudaTimer
from kvgen.reference.tolerance import tolerance
from kvgen.spec import KernelSpec, Workload
from kvgen.toolchain.cache import ArtifactCache
from kvgen.toolchain.pool import build_many

PLAIN = "8x32768"
UNEQUAL = "1x131072+63x1024"
MODERATE = "1x57344+1x50176+1x43008+1x35840+1x28672+1x21504+1x14336+1x11264"
WIDE, FINE = ("w8u4d1", "w16u2d1", "w8u4d1.unit"), ("w8u2d2", "w16u2d1", "w8u2d2.unit")
"""Schedules for units of 128 and of 64 tokens."""
POLICY = TimingPolicy(seconds=0.03, warmup_seconds=0.02, samples=10)
Row = dict[str, Any]


@dataclass
class Shape:
    """A case: words of spec and workload, the name of its sibling, schedules to try."""

    name: str
    words: str
    work: str = PLAIN
    sibling: str | None = None
    schedules: tuple[str, ...] = WIDE
    modules: list[Row] = field(default_factory=list)

    @property
    def spec(self) -> KernelSpec:
        """The spec, for its workload."""
        return spec_of(self.words, "sm90", [workload_of(self.work)])


SHAPES = (
    Shape("plain", "k4v4"),
    Shape("page 128", "k4v4:page128", sibling="plain"),
    Shape("page 256", "k4v4:page256", sibling="plain"),
    Shape("groups of 64", "k4v4:kg64", schedules=FINE),
    Shape("page 64", "k4v4:kg64:page64", sibling="groups of 64", schedules=FINE),
    Shape("token", "k4v4:token"),
    Shape("token, page 64", "k4v4:token:page64", sibling="token"),
    Shape("token, page 32", "k4v4:token:page32", sibling="token"),
    Shape("token, page 16", "k4v4:token:page16", sibling="token"),
    Shape("as many bytes as 1x131072+63x1024", "k4v4", "8x24448"),
    Shape("ragged, one long", "k4v4", UNEQUAL, "as many bytes as 1x131072+63x1024", (*WIDE, "w8u4d1.flat")),
    Shape("ragged, moderate", "k4v4", MODERATE, "plain", (*WIDE, "w8u4d1.flat")),
    Shape("bfloat16", "k4v4:bf16", sibling="plain"),
    Shape("q_len 4", "k4v4:q4", PLAIN + "q4", "plain", ("w8u4d1", "w8u2d1", "w8u2d1.cl2")),
    Shape("group 16", "k4v4:h128/8", sibling="plain", schedules=("w8u4d1", "w8u2d1", "w8u2d1.cl2")),
    Shape("group 5", "k4v4:h40/8", sibling="plain", schedules=("w8u4d1", "w8u4d1.cl2", "w8u4d1.noexact")),
    Shape("head_dim 64", "k4v4:d64", schedules=("w8u4d2", "w8u4d2.cl2", "w8u4d1c2")),
    Shape("head_dim 96", "k4v4:d96", schedules=("w8u4d1", "w12u4d1", "w8u4d1.cl2")),
    Shape("head_dim 256", "k4v4:d256", schedules=("w8u2d1", "w8u2d1.cl2", "w8u2d1.bulk")),
    Shape("7 of 5120", "k4v4", "7x5120", schedules=("w8u4d1", "w8u4d1.cl2", "w8u2d2.cl2")),
    Shape("13 of 20000", "k4v4", "13x20000", schedules=("w8u4d1", "w16u2d1", "w8u4d1.flat")),
    Shape("K 4 bits, V 2 bits", "k4v2", schedules=("w8u4d1", "w12u4d1", "w8u4d1.cl2")),
    Shape("K 8 bits, V 4 bits", "k8v4", schedules=("w8u2d1", "w8u1d2.cl2", "w8u1d2")),
)


def main() -> int:
    """Compile, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="parts of names; all by default")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-torch", action="store_true")
    options = parser.parse_args()
    shapes = [shape for shape in SHAPES if not options.cases or any(part in shape.name for part in options.cases)]
    started = time.monotonic()
    compile_all(shapes)
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    rows: dict[str, Row] = {}
    for shape in shapes:
        if not shape.modules:
            continue
        row = measure(shape, options.rounds)
        if row["relative_l2"] > tolerance(shape.spec.attention.dtype):
            print(f"{shape.name}: WRONG ({row['relative_l2']:.1e})", flush=True)
            continue
        row |= beside(row, rows.get(shape.sibling or ""))
        row |= {"torch_us": "", "torch": "", "speedup": ""} if options.no_torch else torch_columns(shape, row["us"])
        rows[shape.name] = row
        write(list(rows.values()))
        print(
            f"{shape.name:34}{row['schedule']:20}{row['us']:9.2f} µs  {row['read_fraction']:.3f} of the read  "
            f"{row['relative'] or '':>6} of {row['sibling'] or 'no sibling':16} torch {row['torch_us']:>8}  {row['relative_l2']:.1e} "
            f"{'SPILL' if row['spill_bytes'] else ''}",
            flush=True,
        )
    print(f"{time.monotonic() - started:.0f} s", flush=True)
    return 0 if len(rows) == len(shapes) else 1


def compile_all(shapes: list[Shape]) -> None:
    """Fill the shapes' modules; what cannot be built is told."""
    backend, store = get_backend("cuda"), ArtifactCache()
    tasks: list[tuple[Shape, Any, Source]] = []
    for shape in shapes:
        for words in shape.schedules:
            try:
                schedule = schedules_of(words, backend, shape.spec, "sm90")[0]
                tasks.append((shape, schedule, backend.lower(shape.spec, schedule, "sm90")))
            except KvgenError as error:  # noqa: PERF203 - the others go on
                print(f"- {shape.name} {words}: {error}", flush=True)
    sources = list(dict.fromkeys(source for _, _, source in tasks))
    yardstick.artifact("sm90", store)
    for index, artifact in build_many(sources, len(os.sched_getaffinity(0)), store):
        for shape, schedule, source in tasks:
            if source != sources[index]:
                continue
            if isinstance(artifact, CompileError):
                print(f"- {shape.name}: {artifact}", flush=True)
                continue
            worst = max((k for name, k in artifact.resources.kernels.items() if "attend" in name), key=lambda k: k.registers)
            shape.modules.append(
                {"schedule": schedule, "path": artifact.path, "registers": worst.registers, "spill_bytes": worst.spill_bytes}
            )


def measure(shape: Shape, rounds: int) -> Row:
    """The fastest right schedule of a shape; all take turns with reads of as many bytes."""
    from kvgen.toolchain.module import load

    spec, work = shape.spec, workload_of(shape.work)
    layouts: dict[str, Caches] = {}
    entrants: list[tuple[Row, Caches, float, Any, list[float]]] = []
    runners = []  # a graph does not keep the memory it works in
    for module in shape.modules:
        layout = get_backend("cuda").layout(spec, module["schedule"].layout)
        if layout.id not in layouts:
            layouts[layout.id] = make_caches(spec, layout, work, lengths_of(shape.work), 4.0)
        caches = layouts[layout.id]
        runner = Runner(spec, load(module["path"]), caches, work)
        runners.append(runner)
        error = runner.error()
        graph = capture([partial(runner.attend, i) for i in range(len(caches.packed))])
        entrants.append((module, caches, error, graph, []))
    reads: dict[int, list[float]] = {caches.bytes: [] for caches in layouts.values()}
    for number in range(rounds):
        for _, _, _, graph, samples in entrants:
            samples.append(timed(*graph))
        if number % 3 == 0:
            for nbytes in reads:
                reads[nbytes] += yardstick.yardstick("sm90").samples(nbytes, POLICY)
    right = [one for one in entrants if one[2] <= tolerance(spec.attention.dtype)] or entrants
    module, caches, error, _, samples = min(right, key=lambda one: median(one[4]))
    us, read = median(samples), median(reads[caches.bytes])
    return {
        "case": shape.name, "spec": shape.words, "workload": shape.work, "schedule": schedule_word(module["schedule"]),
        "us": round(us, 3), "low_us": round(min(samples), 3), "bytes": caches.bytes, "tb_s": round(caches.bytes / us / 1e6, 4),
        "read_us": round(read, 3), "read_fraction": round(read / us, 4), "relative_l2": error,
        "registers": module["registers"], "spill_bytes": module["spill_bytes"],
    }  # fmt: skip


def beside(row: Row, sibling: Row | None) -> Row:
    """Share of the sibling's speed, both as fractions of a read of their bytes."""
    if sibling is None:
        return {"sibling": "", "relative": ""}
    return {"sibling": sibling["case"], "relative": round(row["read_fraction"] / sibling["read_fraction"], 4)}


# --- torch --------------------------------------------------------------------------------------------------------------


def torch_columns(shape: Shape, us: float) -> Row:
    """torch's fastest way to the same attention over an unquantized 16-bit cache."""
    spec, work = shape.spec, workload_of(shape.work)
    layout = get_backend("cuda").layout(spec, shape.modules[0]["schedule"].layout)
    lengths = [half_full(layout, length) for length in lengths_of(shape.work)]
    a = spec.attention
    key = (a.q_heads, a.kv_heads, a.head_dim, a.dtype, work.q_len)
    if len(set(lengths)) == 1:
        best, name = dense(key, work.batch, lengths[0])
    else:
        each = [dense(key, count, length) for length, count in Counter(lengths).items()]
        best, name = min((sum(found for found, _ in each), f"{len(each)} calls, one per length"), packed(key, tuple(lengths)))
    torch.cuda.empty_cache()
    return {"torch_us": round(best, 1), "torch": name, "speedup": round(best / us, 2)}


@cache
def dense(key: tuple[Any, ...], batch: int, length: int) -> tuple[float, str]:
    """µs and name of the fastest of torch's kernels over sequences of one length."""
    spec = _unquantized(key, batch, length)
    case = Case(spec, spec.workloads[0], "sm90", length)
    found = []
    for provider in cuda_providers(spec.attention.dtype):
        try:
            found.append((median(provider.prepare(case).sample(POLICY)), provider.backend))
        except UnsupportedError:  # noqa: PERF203 - the others go on
            continue
    return min(found)


@cache
def packed(key: tuple[Any, ...], lengths: tuple[int, ...]) -> tuple[float, str]:
    """µs of torch's flash attention over sequences that lie one behind the other."""
    q_heads, kv_heads, dim, dtype, q_len = key
    k, v = (torch.randn(sum(lengths), kv_heads, dim, device="cuda").to(getattr(torch, dtype)) for _ in range(2))
    q = torch.randn(len(lengths) * q_len, q_heads, dim, device="cuda").to(k.dtype)
    starts_q = torch.arange(len(lengths) + 1, dtype=torch.int32, device="cuda") * q_len
    starts_k = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    call = partial(torch.ops.aten._flash_attention_forward, q, k, v, starts_q, starts_k, q_len, max(lengths), 0.0, q_len > 1, False)
    return median(CudaTimer().time([call], POLICY)), "flash, packed sequences"


def _unquantized(key: tuple[Any, ...], batch: int, length: int) -> KernelSpec:
    q_heads, kv_heads, dim, dtype, q_len = key
    word = f"k16v16:h{q_heads}/{kv_heads}:d{dim}:q{q_len}" + (":bf16" if dtype == "bfloat16" else "")
    return spec_of(word, "sm90", [Workload(batch=batch, kv_len=length, q_len=q_len)])


def write(rows: list[Row]) -> None:
    """All rows so far."""
    told = {name: fact for name, fact in facts("sm90", POLICY).items() if name != "threads"}
    write_rows("h200_shapes", rows, told)


if __name__ == "__main__":
    sys.exit(main())
