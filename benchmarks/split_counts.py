"""Time of every number of splits that a head may get, beside the number that the host's model chooses (`schedule/split_model.cuh`).

    python benchmarks/split_counts.py --read benchmarks/results/h200_split_counts.csv
    python benchmarks/split_counts.py --batches 9,17,24,40 --lengths 4096,32768 --case "k4v4 w8u4d1,w4u4d1c2" --case "k8v8 w8u2d1"
    python benchmarks/split_counts.py --backend tilelang --batches 9,17 --lengths 4096,20000 --case "k4v4 w8u2s2"

A case is a spec and schedules in the words of gpu_words.py, which have no clusters. Their modules are compiled from headers in which the
environment overrules the model; nothing else differs. Numbers of splits go up to `--most`, as long as a launch has at most `--waves`
times the CTAs that run at once. All of them are timed in turns, idle-rested. Rows go to $OUT (or benchmarks/results) as
GPU_split_counts.csv after every workload; `chosen` is the number that the model chooses. Workloads that do not fit into memory, and
those that `--seconds` has no time for, are told and left out. The last lines sum up what the choices of each schedule
lose; `--read` measures nothing, and sums up a file, of which the column `chosen_before` has the choices of an earlier model.
"""

from __future__ import annotations

import csv
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.command import add_rounds, parser, processors
from benchmarks.output import gpu_today, of_gpu, write_rows
from benchmarks.turns import Timer

if TYPE_CHECKING:
    from kvgen.lower.schedule import Schedule
    from kvgen.runtime.variant import Variant
    from kvgen.spec import Workload

ROOT = Path(__file__).resolve().parent.parent
HEADER = Path("templates/cuda/include/kvgen/schedule/split_model.cuh")
FORCED = "KVGEN_SPLITS"
"""The environment variable that the compiled module asks for the number of splits."""
MOST = "  int most(int limit) const {"
CHEAPEST = "  int cheapest(int tiles, int limit) const {"
REPLACED = (
    ("#include <algorithm>", "#include <algorithm>\n#include <cstdlib>"),
    (MOST, f'{MOST}\n    if (const char* forced = std::getenv("{FORCED}")) return std::atoi(forced);'),
    (CHEAPEST, f'{CHEAPEST}\n    if (const char* forced = std::getenv("{FORCED}")) return std::clamp(std::atoi(forced), 1, tiles);'),
)


Row = dict[str, Any]


def forcible(folder: Path) -> None:
    """Make `folder` a copy of the templates whose model can be overruled, and let this process use it."""
    for part in ("templates", "search_spaces"):
        shutil.copytree(ROOT / part, folder / part)
    text = (folder / HEADER).read_text()
    for before, after in REPLACED:
        if text.count(before) != 1:
            raise SystemExit(f"{HEADER} has changed: {before!r} is not in it once")
        text = text.replace(before, after)
    (folder / HEADER).write_text(text)
    os.environ["KVGEN_DATA_DIR"] = str(folder)


def main() -> int:
    """Compile, time, write."""
    command = parser(__doc__)
    command.add_argument("--read", type=Path, metavar="FILE")
    command.add_argument("--backend", choices=["cuda", "tilelang"], default="cuda")
    command.add_argument("--case", action="append", default=[], metavar="'SPEC SCHEDULE[,SCHEDULE]'")
    command.add_argument("--batches", default="")
    command.add_argument("--lengths", default="")
    command.add_argument("--most", type=int, default=12, help="splits of a head")
    command.add_argument("--waves", type=int, default=8)
    command.add_argument("--most-tokens", type=int, default=1 << 21, help="of all sequences together")
    command.add_argument("--seconds", type=float, default=300.0)
    command.add_argument("--name", default=of_gpu("split_counts"))
    add_rounds(command)
    command.set_defaults(rounds=2)
    options = command.parse_args()
    if options.read:
        with options.read.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        for choice in (name for name in ("chosen_before", "chosen") if name in rows[0]):
            print(f"{choice}:", *summary(rows, choice), sep="\n  ")
        return 0
    if not (options.case and options.batches and options.lengths):
        command.error("give --case, --batches and --lengths, or --read")
    with tempfile.TemporaryDirectory(prefix="splits-") as folder:
        forcible(Path(folder))
        return 0 if measure(options, time.monotonic() + options.seconds) else 1


def measure(options: Any, end: float) -> int:
    """Time all cases; the number of rows. Imports kvgen, which must find the templates of `forcible`."""
    from kvgen.measure.inputs import NoRoom
    from kvgen.spec import Workload

    rows: list[Row] = []
    known = gpu_today()
    works = [Workload(batch=int(b), kv_len=int(n)) for n in options.lengths.split(",") for b in options.batches.split(",")]
    for words in options.case:
        variants = compiled(options.backend, *words.split())
        for work in works:
            if work.batch * work.kv_len > options.most_tokens:
                continue
            if time.monotonic() > end:
                print(f"- {words}: no time for {work.key}", flush=True)
                continue
            try:
                found = timed(variants, work, options)
            except NoRoom as error:
                print(f"- {words}, {work.key}: {error}", flush=True)
                continue
            rows += [{"spec": words.split()[0], "backend": options.backend, **row} for row in found]
            write_rows(options.name, rows, known)
            print(*(f"{row['schedule']} {row['splits']}: {row['us']}" for row in best_of(found)), flush=True)
    print("\n".join(summary(rows)))
    return len(rows)


def compiled(backend_name: str, spec_words: str, schedule_words: str) -> dict[str, tuple[Schedule, Variant]]:
    """The schedules of a back end and a case by their words, compiled and loaded. Raises CompileError and CompilerCrash."""
    from benchmarks.compiling import build_sources
    from benchmarks.gpu_words import schedules_of, spec_of
    from kvgen.lower.backends import get_backend
    from kvgen.lower.schedule import layout_of
    from kvgen.runtime.module import load
    from kvgen.runtime.variant import Variant
    from kvgen.spec import Workload
    from kvgen.toolchain import Artifact

    backend, spec = get_backend(backend_name), spec_of(spec_words, "sm90", [Workload(batch=1, kv_len=4096)])
    schedules = {word: schedules_of(word, backend, spec, "sm90")[0] for word in schedule_words.split(",")}
    built = build_sources([backend.lower(spec, schedule, "sm90") for schedule in schedules.values()], processors())
    variants = {}
    for (word, schedule), artifact in zip(schedules.items(), built, strict=True):
        if not isinstance(artifact, Artifact):
            raise artifact
        variants[word] = schedule, Variant(spec, layout_of(spec, schedule.layout), load(artifact.path))
    return variants


def timed(variants: Mapping[str, tuple[Schedule, Variant]], work: Workload, options: Any) -> list[Row]:
    """Rows of one workload: every number of splits of every schedule. Raises NoRoom where its caches do not fit into memory."""
    from benchmarks.turns import take_turns
    from kvgen.arch import GPUS
    from kvgen.measure.inputs import WorkloadInputs
    from kvgen.measure.job import TimingPolicy
    from kvgen.measure.read_roofline import read_roofline

    policy = TimingPolicy(seconds=0.02, warmup_seconds=0.004, samples=5)
    first = next(variant for _, variant in variants.values())
    inputs, heads = WorkloadInputs(first, work, "cuda"), work.batch * first.spec.attention.kv_heads
    turns = {}
    for name, (schedule, variant) in variants.items():
        most = options.waves * GPUS["sm90"].sms * schedule.launch.integer("ctas_per_sm") // heads
        for count in range(1, max(1, min(options.most, most)) + 1):
            turns[name, count] = partial(forced, count, partial(inputs.time, variant, policy))
    reads = {inputs.nbytes: partial(read_roofline("sm90").samples, inputs.nbytes, policy)}
    found, read = take_turns(turns, options.rounds, reads)
    facts = {"workload": work.key, "heads": heads, "kv_len": work.kv_len}
    chosen = {name: chosen_splits(variant, work, schedule.launch.integer("kv_tile")) for name, (schedule, variant) in variants.items()}
    read_us = round(median(read[inputs.nbytes]), 3)
    return [
        {"schedule": name, **facts, "splits": count, "chosen": chosen[name], "us": round(median(samples), 3), "read_us": read_us}
        for (name, count), samples in found.items()
    ]


def chosen_splits(variant: Variant, work: Workload, kv_tile: int) -> int:
    """The number that the model chooses. Splits are of whole KV tiles; the tokens behind the last one belong to no split of their own."""
    tokens = variant.module.split_tokens(work.batch, work.kv_len, 1)
    return -(-(work.kv_len // kv_tile * kv_tile) // tokens) if tokens else 1


def best_of(rows: Sequence[Row]) -> list[Row]:
    """The fastest row of every schedule."""
    least: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: float(row["us"])):
        least.setdefault(row["schedule"], row)
    return list(least.values())


def summary(rows: Sequence[Mapping[str, Any]], choice: str = "chosen") -> Iterator[str]:
    """By kernel, the time with the chosen number of splits over that with the best one: geometric mean, worst, above 1.05."""
    times: dict[str, dict[str, dict[int, float]]] = {}
    chosen: dict[tuple[str, str], int] = {}
    for row in rows:
        kernel = " ".join(filter(None, (row.get("backend"), row["spec"], row["schedule"])))
        times.setdefault(kernel, {}).setdefault(row["workload"], {})[int(row["splits"])] = float(row["us"])
        chosen[kernel, row["workload"]] = int(row[choice])
    losses = {
        kernel: [us[chosen[kernel, work]] / min(us.values()) for work, us in found.items() if chosen[kernel, work] in us]
        for kernel, found in times.items()
    }
    for kernel, lost in (losses | {"all": [loss for each in losses.values() for loss in each]}).items():
        mean = math.exp(sum(map(math.log, lost)) / max(1, len(lost)))
        yield f"{kernel}: {len(lost)} workloads, {mean:.3f}, worst {max(lost, default=1):.3f}, {sum(x > 1.05 for x in lost)} above 1.05"


def forced(count: int, timer: Timer) -> Iterable[float]:
    """A turn with so many splits."""
    os.environ[FORCED] = str(count)
    try:
        return timer()
    finally:
        del os.environ[FORCED]


if __name__ == "__main__":
    sys.exit(main())
