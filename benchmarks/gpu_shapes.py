"""Every shape and cache beside the plain one, on both GPU back ends: how far each is from a read of its bytes, from its sibling, and from
torch SDPA.

    python benchmarks/gpu_shapes.py [CASE…] [--backend cuda,tilelang] [--rounds 9] [--no-torch]
    python benchmarks/gpu_shapes.py --lower-only          on any machine with TileLang: fills $KVGEN_CACHE_DIR/lowered, which may be carried

Compiles a few schedules per shape (shape_cases.py) and back end in parallel, verifies and times those of a shape in this process, all in
turns, as soon as they are compiled, and keeps the fastest right one of each back end. A case's sibling has the same bytes in a plainer
shape; it is that of the same back end, and for `best`, the faster back end, the faster of the sibling's. torch's time is that of its
fastest 16-bit kernel for the same attention; for a ragged batch, the faster of one call per length and of its kernel for packed
sequences. The back end's own default takes part everywhere: `default_ratio` is its time over the fastest schedule's, and what is above
1.05 is told. Rows go to $OUT (or benchmarks/results) as GPU_shapes.csv, after every case.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.command import add_rounds, parser, processors
from benchmarks.compiling import attend_usage, lower_all
from benchmarks.gpu_measure import Caches, Runner, capture, make_caches, replayed
from benchmarks.gpu_words import lengths_of, schedule_word, spec_of, workload_of
from benchmarks.output import gpu_facts, of_gpu, write_rows
from benchmarks.shape_cases import SHAPES, TARGET, Shape, named
from benchmarks.turns import take_turns
from kvgen.bench.case import Case
from kvgen.bench.torch_sdpa import cuda_providers
from kvgen.errors import CompileError, CompilerCrash, KvgenError, UnsupportedError
from kvgen.lower.base import Source
from kvgen.lower.schedule import Schedule, layout_of
from kvgen.measure import read_roofline
from kvgen.measure.bytes import half_full
from kvgen.measure.job import TimingPolicy
from kvgen.measure.timer import CudaTimer
from kvgen.reference.tolerance import tolerance
from kvgen.spec import KernelSpec, Workload
from kvgen.toolchain import Artifact, ArtifactCache
from kvgen.toolchain.pool import CompilePool

BACKENDS = ("cuda", "tilelang")
FREE = 2
"""Processors without a compiler: what launches the kernels that are timed must not wait for one."""
BEST = "best"
DEFAULT_LIMIT = 1.05
"""Time of a back end's default over its fastest schedule, above which it is told."""
POLICY = TimingPolicy(seconds=0.03, warmup_seconds=0.02, samples=10)
Row = dict[str, Any]
Task = tuple[Shape, Schedule, Source]


def main() -> int:
    """Lower; then compile, measure, print, write. 1 where a case that was asked for has no row, or any kernel was wrong."""
    command = parser(__doc__)
    command.add_argument("cases", nargs="*", help="names, or parts of names; all by default")
    command.add_argument("--backend", default=",".join(BACKENDS), help="one or both; both by default")
    add_rounds(command)
    command.add_argument("--no-torch", action="store_true")
    command.add_argument("--lower-only", action="store_true", help="needs no GPU")
    options = command.parse_args()
    backends = options.backend.split(",")
    if unknown := set(backends) - set(BACKENDS):
        command.error(f"{min(unknown)!r} is no back end of a GPU; there are {' and '.join(BACKENDS)}")
    shapes = [shape for shape in SHAPES if not options.cases or any(named(shape, word, SHAPES) for word in options.cases)]
    started = time.monotonic()
    tasks, refused = lowered(shapes, backends)
    print(f"lowered {len(tasks)} schedules in {time.monotonic() - started:.0f} s, {refused} could not be", flush=True)
    if options.lower_only:
        return 1 if refused else 0
    read_roofline.artifact(TARGET)
    rows: dict[tuple[str, str], Row] = {}
    faults = refused
    with CompilePool(ArtifactCache(), max(1, processors() - FREE)) as pool:
        compiling = {source: pool.run(partial(pool.build, source)) for source in dict.fromkeys(source for _, _, source in tasks)}
        for shape in shapes:
            fill_modules(shape, [(schedule, compiling[source]) for other, schedule, source in tasks if other is shape])
            if not shape.modules:
                continue
            shared: Row = {"torch_us": "", "torch_kernel": ""}
            try:
                found, wrong = measure(shape, options.rounds)
                shared = shared if options.no_torch or not found else torch_columns(shape)
            except Exception as error:  # the others go on
                print(f"{shape.name}: {type(error).__name__}: {error}", flush=True)
                found, wrong = [], 1
            torch.cuda.empty_cache()
            faults += wrong
            for mine in with_best(found):
                speedup = round(shared["torch_us"] / mine["us"], 2) if shared["torch_us"] else ""
                row = {**mine, **beside(mine, rows), **shared, "speedup": speedup}
                rows[row["case"], row["backend"]] = row
                show(row)
            write(list(rows.values()))
    summary(rows)
    print(f"{time.monotonic() - started:.0f} s", flush=True)
    return 0 if rows and not faults and all((shape.name, BEST) in rows for shape in shapes) else 1


def lowered(shapes: Sequence[Shape], backends: Sequence[str]) -> tuple[list[Task], int]:
    """Sources of all schedules, and how many had none without being refused; that is told."""
    points = [(shape, schedule) for shape in shapes for name in backends for schedule in shape.points_with_default(name)]
    sources = lower_all([(shape.spec, schedule) for shape, schedule in points], TARGET, processors())
    tasks: list[Task] = []
    for (shape, schedule), source in zip(points, sources, strict=True):
        if isinstance(source, KvgenError):
            print(f"- {shape.name} {schedule.backend} {schedule_word(schedule)}: {source}", flush=True)
        else:
            tasks.append((shape, schedule, source))
    return tasks, len(points) - len(tasks)


def fill_modules(shape: Shape, compiling: Sequence[tuple[Schedule, Future[Artifact]]]) -> None:
    """Fill a shape's modules as they are compiled; what cannot be built is told."""
    for schedule, job in compiling:
        try:
            artifact = job.result()
        except (CompileError, CompilerCrash) as error:
            print(f"- {shape.name} {schedule.backend} {schedule_word(schedule)}: {error}", flush=True)
            continue
        registers, spill_bytes = attend_usage(artifact)
        shape.modules.append({"schedule": schedule, "path": artifact.path, "registers": registers, "spill_bytes": spill_bytes})


def measure(shape: Shape, rounds: int) -> tuple[list[Row], int]:
    """The fastest right schedule of each back end, and how many were wrong; all take turns with reads of as many bytes."""
    from kvgen.runtime.module import load

    spec, work = shape.spec, workload_of(shape.work)
    layouts: dict[str, Caches] = {}
    entrants: list[tuple[Row, Caches, float, Any]] = []
    runners = []  # a graph does not keep the memory it works in
    for module in shape.modules:
        layout = layout_of(spec, module["schedule"].layout)
        if layout.id not in layouts:
            layouts[layout.id] = make_caches(spec, layout, work, lengths_of(shape.work), 4.0)
        caches = layouts[layout.id]
        runner = Runner(spec, load(module["path"]), caches, work)
        runners.append(runner)
        error = runner.error()
        graph = capture([partial(runner.attend, i) for i in range(len(caches.packed))])
        entrants.append((module, caches, error, graph))
    roofline = read_roofline.read_roofline(TARGET)
    found, reads = take_turns(
        {index: partial(replayed, graph) for index, (_, _, _, graph) in enumerate(entrants)},
        rounds,
        {caches.bytes: partial(roofline.samples, caches.bytes, POLICY) for caches in layouts.values()},
    )
    best: dict[str, Row] = {}
    defaults: dict[str, float] = {}
    for index in sorted(found, key=lambda index: median(found[index])):
        (module, caches, error, _), samples = entrants[index], found[index]
        schedule, us, read = module["schedule"], median(samples), median(reads[caches.bytes])
        if error > tolerance(spec.attention.dtype):
            print(f"{shape.name} {schedule.backend} {schedule_word(schedule)}: WRONG ({error:.1e})", flush=True)
            continue
        if schedule == shape.default(schedule.backend):
            defaults[schedule.backend] = us
        best.setdefault(schedule.backend, {
            "case": shape.name, "spec": shape.words, "workload": shape.work, "backend": schedule.backend,
            "schedule": schedule_word(schedule), "us": round(us, 3), "low_us": round(min(samples), 3), "bytes": caches.bytes,
            "tb_s": round(caches.bytes / us / 1e6, 4), "read_us": round(read, 3), "read_fraction": round(read / us, 4),
            "relative_l2": error, "registers": module["registers"], "spill_bytes": module["spill_bytes"],
        })  # fmt: skip
    rows = [beside_default(row, defaults.get(row["backend"])) for row in best.values()]
    return rows, sum(entrant[2] > tolerance(spec.attention.dtype) for entrant in entrants)


def beside_default(row: Row, default_us: float | None) -> Row:
    """A back end's fastest row with the time of its default, which is None where that was wrong or not built. Says so where it is slow."""
    if default_us is None:
        print(f"{row['case']} {row['backend']}: the default has no time", flush=True)
        return {**row, "default_us": "", "default_ratio": ""}
    ratio = round(default_us / row["us"], 4)
    if ratio > DEFAULT_LIMIT:
        print(f"{row['case']} {row['backend']}: the default takes {ratio:.2f} times the time of {row['schedule']}", flush=True)
    return {**row, "default_us": round(default_us, 3), "default_ratio": ratio}


def with_best(found: Sequence[Row]) -> list[Row]:
    """Rows of a case, in the order of BACKENDS, and the fastest of them once more as `best`."""
    rows = sorted(found, key=lambda row: BACKENDS.index(row["backend"]))
    fastest = [{**row, "backend": BEST, "schedule": f"{row['backend']} {row['schedule']}"} for row in rows]
    return rows + sorted(fastest, key=lambda row: float(row["us"]))[:1]


def beside(row: Row, rows: dict[tuple[str, str], Row]) -> Row:
    """Share of the sibling's speed on the same back end, both as fractions of a read of their bytes."""
    name = next(shape.sibling for shape in SHAPES if shape.name == row["case"])
    sibling = rows.get((name or "", row["backend"]))
    relative = round(row["read_fraction"] / sibling["read_fraction"], 4) if sibling else ""
    return {"sibling": name or "", "relative": relative}


def show(row: Row) -> None:
    """One row, as a line."""
    print(
        f"{row['case']:40}{row['backend']:9}{row['schedule']:32}{row['us']:9.2f} µs  {row['read_fraction']:.3f} of the read  "
        f"{row['relative'] or '':>6} of {row['sibling'] or 'no sibling':16} torch {row['torch_us']:>8}  {row['relative_l2']:.1e} "
        f"{'SPILL' if row['spill_bytes'] else ''}",
        flush=True,
    )


def summary(rows: dict[tuple[str, str], Row]) -> None:
    """What the cases come to: fraction of the read on each back end, the best of both beside the best of its sibling, and the time of
    CUDA's default over its fastest schedule.
    """
    print(f"{'case':40}" + "".join(f"{name:>10}" for name in (*BACKENDS, BEST)) + "   default   best beside its sibling's")
    for case in dict.fromkeys(case for case, _ in rows):
        each = "".join(f"{rows[case, name]['read_fraction'] if (case, name) in rows else '-':>10}" for name in (*BACKENDS, BEST))
        row = rows[case, BEST]
        default = rows.get((case, "cuda"), {}).get("default_ratio", "")
        print(f"{case:40}{each}{default:>10}{row['relative'] or '':>9} {row['sibling']}", flush=True)


# --- torch --------------------------------------------------------------------------------------------------------------


def torch_columns(shape: Shape) -> Row:
    """torch's fastest way to the same attention over an unquantized 16-bit cache."""
    spec, work = shape.spec, workload_of(shape.work)
    layout = layout_of(spec, shape.modules[0]["schedule"].layout)
    lengths = [half_full(shape.spec, layout, length) for length in lengths_of(shape.work) if length]
    a = spec.attention
    key = (a.q_heads, a.kv_heads, a.head_dim, a.dtype, work.q_len)
    if len(set(lengths)) == 1:
        best, name = dense(key, work.batch, lengths[0])
    else:
        each = [dense(key, count, length) for length, count in Counter(lengths).items()]
        best, name = min((sum(found for found, _ in each), f"{len(each)} calls, one per length"), packed(key, tuple(lengths)))
    torch.cuda.empty_cache()
    return {"torch_us": round(best, 1), "torch_kernel": name}


@cache
def dense(key: tuple[Any, ...], batch: int, length: int) -> tuple[float, str]:
    """µs and name of the fastest of torch's kernels over sequences of one length."""
    spec = _unquantized(key, batch, length)
    case = Case(spec, spec.workloads[0], TARGET, length)
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
    return spec_of(word, TARGET, [Workload(batch=batch, kv_len=length, q_len=q_len)])


def write(rows: list[Row]) -> None:
    """All rows so far."""
    write_rows(of_gpu("shapes"), rows, gpu_facts(POLICY))


if __name__ == "__main__":
    sys.exit(main())
