"""Decode attention of formats and shapes on both GPU back ends, each beside a read of the same bytes.

    python benchmarks/gpu_shapes.py [CASE…] [--all] [--backend cuda,tilelang] [--defaults | --tune SECONDS] [--flashinfer] [--rounds 9]

Without names the first ten cases run, by which two states of the kernels are compared. Each back end's default and the schedules below
that its search space allows are compiled, then timed in turns, A B C A B C …; the fastest of each back end is verified against the fp64
reference. `default_us` is the time of the back end's default. `--defaults`: nothing else. `--tune`: beside the default, in place of
those schedules, the launches that a build of so many seconds keeps, with nothing of earlier builds. `--flashinfer`: FlashInfer's decode
over fp8 takes turns with them, on tensor cores and on CUDA cores; the faster one gets a row. Rows go to $OUT (or benchmarks/results) as
GPU_shapes.csv, after every case.
Exits with 1 where a schedule does not compile or is wrong.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.common import Timer, gpu_facts, gpu_word, parser, take_turns, write_rows
from benchmarks.gpu_words import lengths_of, schedule_word, schedules_of, spec_of, workload_of
from kvgen import build
from kvgen._machine import cores
from kvgen.bench.libraries import FlashInfer
from kvgen.bench.run import Case, Provider
from kvgen.errors import CheckError, KvgenError, UnsupportedError
from kvgen.format.sizes import half_full
from kvgen.lower.backend import Source, get_backend
from kvgen.lower.schedule import Schedule, layout_of
from kvgen.measure.inputs import WorkloadInputs
from kvgen.measure.measurement import TimingPolicy
from kvgen.measure.read_roofline import read_roofline
from kvgen.runtime.calls import Variant
from kvgen.runtime.module import load
from kvgen.spec import KernelSpec
from kvgen.toolchain.compile import build_many
from kvgen.verify.check import check

TARGET = "sm90"
POLICY = TimingPolicy(seconds=0.03, warmup_seconds=0.02, samples=10)
PLAIN, SHORTER = "8x32768", "32x8192"
MODERATE = "1x57344+1x50176+1x43008+1x35840+1x28672+1x21504+1x14336+1x11264"
MIXED = "4x2048+4x4096+4x6144+4x8192+4x10240+4x12288+4x14336+4x16384"
KITTY, KITTY_PRO = "k2v2:boost1/8:sink32:local128:page128", "k2v2:boost1/4:sink32:local128:page128"
COMPARED = {
    "plain": ("k4v4", PLAIN),
    "8 bits": ("k8v8", PLAIN),
    "2 bits": ("k2v2", PLAIN),
    "page 128": ("k4v4:page128", PLAIN),
    "ragged, moderate": ("k4v4", MODERATE),
    "ragged, one long": ("k4v4", "1x131072+63x1024"),
    "q_len 4": ("k4v4:q4", PLAIN + "q4"),
    "group 32": ("k4v4:h256/8", PLAIN),
    "kitty": (KITTY, PLAIN),
    "head_dim 64, 64 heads, 64x4096": ("k4v4:d64:h64/8", "64x4096"),
}
FORMATS = {
    "int8, per token": "k8v8:token",
    "int4, per token": "k4v4:token",
    "e4m3, per token": "ke4m3ve4m3:token",
    "e5m2, per token": "ke5m2ve5m2:token",
    "K e4m3, V int4": "ke4m3v4:token",
    "saw-int4": "k4v4:token:krot16u",
    "int4, rotated": "k4v4:token:krot128:vrot128",
    "nvfp4": "knvfp4vnvfp4",
    "mxfp4": "kmxfp4vmxfp4",
    "nvfp4, static per tensor": "knvfp4vnvfp4:kscale-tensor:vscale-tensor",
    "int8, static per channel": "k8v8:sym:vchannel:kscale-channel:vscale-channel",
    "e4m3, static per tensor": "ke4m3ve4m3:kscale-tensor:vscale-tensor",
    "int8, static per channel, on arrival": "k8v8:sym:vchannel:kscale-channel:vscale-channel:page16:arrival",
    "int4, on arrival": "k4v4:token:page16:arrival",
}
CASES = COMPARED | {name: (words, PLAIN) for name, words in FORMATS.items()}
CASES |= {f"{name}, 32x8192": (words, SHORTER) for name, words in FORMATS.items()}
CASES |= {
    "ragged, 2K to 16K": ("k4v4", MIXED),
    "ragged, moderate, 8 bits": ("k8v8", MODERATE),
    "ragged, moderate, 2 bits": ("k2v2", MODERATE),
    "page 256": ("k4v4:page256", PLAIN),
    "page 64": ("k4v4:kg64:page64", PLAIN),
    "token": ("k4v4:token", PLAIN),
    "token, page 16": ("k4v4:token:page16", PLAIN),
    "window 4096": ("k4v4:window4096", PLAIN),
    "softcap 50": ("k4v4:cap50", PLAIN),
    "bfloat16": ("k4v4:bf16", PLAIN),
    "group 5": ("k4v4:h40/8", PLAIN),
    "group 16": ("k4v4:h128/8", PLAIN),
    "group 64": ("k4v4:h512/8", PLAIN),
    "q_len 8": ("k4v4:q8", PLAIN + "q8"),
    "group 8, 2 bits": ("k2v2:h64/8", PLAIN),
    "K 8 bits, V 4 bits": ("k8v4", PLAIN),
    "K 4 bits, V 2 bits": ("k4v2", PLAIN),
    "V per channel, 8 bits": ("k8v8:sym:vchannel", PLAIN),
    "V per channel, 4 bits": ("k4v4:vchannel", PLAIN),
    "sink 32, local 128": ("k4v4:sink32:local128", PLAIN),
    "learned sinks": ("k4v4:sinks", PLAIN),
    "groups of 32": ("k4v4:kg32:vg32", PLAIN),
    "groups of 32, 2 bits": ("k2v2:kg32:vg32", PLAIN),
    "kitty, 32x8192": (KITTY, SHORTER),
    "kitty pro": (KITTY_PRO, PLAIN),
    "kitty pro, 32x8192": (KITTY_PRO, SHORTER),
    "head_dim 64, 64 heads, 1x16384": ("k4v4:d64:h64/8", "1x16384"),
    "head_dim 64, 64 heads, 16x16384": ("k4v4:d64:h64/8", "16x16384"),
    "head_dim 80": ("k4v4:d80", PLAIN),
    "head_dim 80, 2 bits": ("k2v2:d80", PLAIN),
    "head_dim 112": ("k4v4:d112", PLAIN),
    "16 bits": ("k16v16", "8x8192"),
    "16 bits, 32x8192": ("k16v16", SHORTER),
}
"""Words of gpu_words.py for spec and workload."""
EXACT = (
    "w8u4d1",
    "w8u4d1.cl2",
    "w8u2d2",
    "w8u2d2.cl2",
    "w8u2d1.cl2",
    "w8u1d2",
    "w8u1d2.cl2",
    "w12u4d1.cl2",
    "w4u4d1c2",
    "w4u2d2c2",
    "w6u4d1c2",
)
SCHEDULES = {
    "cuda": (*EXACT, "w4u1d2.cl2", "w8u1d1", "w2u2d2c4", *(f"{word}.noexact" for word in EXACT)),
    "tilelang": ("u2s2c4", "u2s2c8", "u4s2c4", "u4s2c6", "u4s2c8"),
}
FLASHINFER = (FlashInfer(fp8=True), FlashInfer(fp8=True, tensor_cores=False))
FP8_ERROR = 1e-2
"""Relative L2 against fp64 attention over the fp8 cache."""
Row = dict[str, Any]


def main() -> int:
    """Compile, time, verify and write, case by case."""
    command = parser(__doc__)
    command.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    command.add_argument("--all", action="store_true", help="all cases")
    command.add_argument("--defaults", action="store_true", help="no other schedules")
    command.add_argument("--tune", type=float, metavar="SECONDS", help="compare the default with what a build of so long finds")
    command.add_argument("--flashinfer", action="store_true", help="FlashInfer's decode over fp8 beside")
    command.add_argument("--backend", default=",".join(SCHEDULES), help="one or both; both by default")
    options = command.parse_args()
    backends = options.backend.split(",")
    if unknown := (set(options.cases) - set(CASES)) | (set(backends) - set(SCHEDULES)):
        command.error(f"there is no {min(unknown)!r}")
    if options.tune:
        os.environ["KVGEN_REGISTRY_DIR"] = tempfile.mkdtemp(prefix="gpu-shapes-")
    good, rows = True, list[Row]()
    for name in options.cases or (CASES if options.all else COMPARED):
        words, work = CASES[name]
        spec = spec_of(words, TARGET, [workload_of(work)])
        defaults, variants, failed = compiled(spec, backends, {} if options.defaults else SCHEDULES, options.tune)
        found, wrong = measure(spec, work, defaults, variants, options.rounds, FLASHINFER if options.flashinfer else ())
        rows += [{"case": name, "spec": words, "workload": work, **row} for row in found]
        for row in found:
            print(
                f"{name:34}{row['backend']:10}{row['schedule']:30}{row['us']:9.2f} µs  {row['read_fraction']:.3f} of the read", flush=True
            )
        good = good and not failed and not wrong
        write_rows(f"{gpu_word()}_shapes", rows, gpu_facts(POLICY))
        torch.cuda.empty_cache()
    return 0 if good else 1


def compiled(
    spec: KernelSpec, backends: list[str], words: Mapping[str, Iterable[str]] = SCHEDULES, tune: float | None = None
) -> tuple[set[Schedule], dict[Schedule, Variant], bool]:
    """The defaults, every schedule of `words` as a variant, and whether any failed to compile, which is told with what a back end refuses.
    With `tune` the schedules are those that a build of so many seconds keeps.
    """
    defaults, points = set[Schedule](), list[Schedule]()
    for backend in map(get_backend, backends):
        try:
            space = backend.space(spec, TARGET)
        except UnsupportedError as error:
            print(f"- {spec.name}: {error}", flush=True)
            continue
        defaults.add(backend.default(spec, TARGET))
        points.append(backend.default(spec, TARGET))
        if tune:
            entry = build(spec, budget=tune, backends=[backend.name]).entry
            points += [Schedule(launch.backend, entry.layout, launch.params) for launch in entry.launches]
        else:
            beside = [schedules_of(word, backend, spec, TARGET)[0] for word in words.get(backend.name, ())]
            points += [schedule for schedule in beside if not space.check(schedule)]
    points = list(dict.fromkeys(points))

    def lower(schedule: Schedule) -> Source | KvgenError:
        try:
            return get_backend(schedule.backend).lower(spec, schedule, TARGET)
        except KvgenError as error:
            return error

    with ThreadPoolExecutor(cores()) as pool:  # TileLang lowers each in a process of its own
        lowered = dict(zip(points, pool.map(lower, points), strict=True))
    sources = {schedule: source for schedule, source in lowered.items() if isinstance(source, Source)}
    built = dict(build_many(list(sources.values()), cores()))
    outcomes = lowered | {schedule: built[index] for index, schedule in enumerate(sources)}
    errors = {schedule: outcome for schedule, outcome in outcomes.items() if isinstance(outcome, KvgenError)}
    for schedule, error in errors.items():
        print(f"- {spec.name} {schedule.backend} {schedule_word(schedule)}: {error}", flush=True)
    loaded = {schedule: load(outcomes[schedule].path) for schedule in points if schedule not in errors}  # type: ignore[union-attr]
    return defaults, {s: Variant(spec, layout_of(spec, s.layout), module) for s, module in loaded.items()}, bool(errors)


def measure(
    spec: KernelSpec,
    work: str,
    defaults: set[Schedule],
    variants: Mapping[Schedule, Variant],
    rounds: int,
    others: Iterable[Provider] = (),
) -> tuple[list[Row], bool]:
    """The row of each back end's fastest schedule and of the fastest other, and whether one was wrong; all take turns with a read of the
    same bytes.
    """
    if not variants:
        return [], False
    inputs = dict[str, WorkloadInputs]()  # by layout
    for variant in variants.values():
        lengths = [half_full(spec, variant.layout, length) for length in lengths_of(work)]
        if variant.layout.id not in inputs:
            inputs[variant.layout.id] = WorkloadInputs(variant, workload_of(work), "cuda", None, lengths)
    of = {schedule: inputs[variant.layout.id] for schedule, variant in variants.items()}
    case = Case(spec, workload_of(work), TARGET, next(iter(inputs.values())).length)
    entrants = {one.backend: one.prepare(case) for one in others}
    timers: dict[Schedule | str, Timer] = {s: partial(of[s].time, variant, POLICY) for s, variant in variants.items()}
    timers |= {name: partial(one.sample, POLICY) for name, one in entrants.items()}
    sizes = {one.nbytes for one in inputs.values()} | {one.nbytes for one in entrants.values()}
    times, reads = take_turns(timers, rounds, {size: partial(read_roofline(TARGET).samples, size, POLICY) for size in sizes})
    rows, wrong = list[Row](), False
    for backend in dict.fromkeys(schedule.backend for schedule in variants):
        us = {schedule: median(times[schedule]) for schedule in variants if schedule.backend == backend}
        best = min(us, key=lambda schedule: us[schedule])
        try:
            check(variants[best], "cuda", exact=best.exact)
        except CheckError as error:
            print(f"- {spec.name} {backend} {schedule_word(best)} is wrong: {error}", flush=True)
            wrong = True
            continue
        default_us = next((us[schedule] for schedule in us if schedule in defaults), None)
        nbytes, read_us = of[best].nbytes, median(reads[of[best].nbytes])
        rows.append({
            "backend": backend, "schedule": schedule_word(best), "us": round(us[best], 3), "bytes": nbytes,
            "read_us": round(read_us, 3), "read_fraction": round(read_us / us[best], 4),
            "default_us": "" if default_us is None else round(default_us, 3),
        })  # fmt: skip
    if entrants:
        name = min(entrants, key=lambda one: median(times[one]))
        nbytes, taken = entrants[name].nbytes, median(times[name])
        if (off := entrants[name].error()) > FP8_ERROR:
            print(f"- {spec.name} {name} is wrong: relative L2 {off:.1e}", flush=True)
            wrong = True
        rows.append({
            "backend": "flashinfer", "schedule": name, "us": round(taken, 3), "bytes": nbytes, "read_us": round(median(reads[nbytes]), 3),
            "read_fraction": round(median(reads[nbytes]) / taken, 4), "default_us": "",
        })  # fmt: skip
    return rows, wrong


if __name__ == "__main__":
    sys.exit(main())
