"""How far the launches that calls take are from the best ones, at batches and lengths that builds do not measure, but for some named ones.

    python benchmarks/gpu_plane.py [SPEC…] [--target sm90] [--seconds 300] [--whole 4] [--rounds 5] [--stride 2] [--seed 1] [--named-only]
    python benchmarks/gpu_plane.py SPEC --target cpu --whole 1 --most-tokens 4096 --no-named --stride 9     a small run anywhere

Takes each spec's registered entry (`kvgen build SPEC`), with the defaults beside it if it has no dispatch table, and times all of its
launches in turns, with reads of the same bytes, at the named rows below and at points between those of the tuner's grid: batches and
lengths a factor of 1.41 off, with equal lengths and with log-uniform ones of another seed, in random order. At the first `--whole` of these
every launch over the entry's layout that the search spaces allow there takes part, of every back end: they are compiled before anything is
timed (lowering beside it would delay the launches), timed once, and the best of them in turns with the entry's. A launch whose output
differs from that of the launch that serves is told and not counted. Sequences of unequal lengths have a plan, made before, as all layers of
a step share one.
At a sustained point the launch serves which calls take if the spec's workloads say `load: sustained`.

Rows go to $OUT (or benchmarks/results) as GPU_plane.SPEC.csv, after every point: the launch of a call whose tokens the host knows, and
beside it (`launch_unknown`) where it knows the longest sequence alone, if lengths are unequal: equal ones would have a plan, too, if the
host did not know that they are equal, and are timed without; `own_us` has the times of the entry's launches by their index, as JSON, and
`nearest_us` the time of the launch that was tuned for the nearest workload. The last lines are worst regret and geometric mean of each
spec. No point is begun after `--seconds`, of which every spec has an equal part; what is left is told.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.command import add_rounds, parser, processors
from benchmarks.gpu_evidence import PLANES
from benchmarks.output import of_gpu, write_rows
from benchmarks.turns import take_turns
from kvgen.arch import device_type
from kvgen.cli.bench import facts
from kvgen.errors import CompileError, CompilerCrash, UnsupportedError
from kvgen.lower.backends import backends_for, refusal
from kvgen.lower.schedule import Schedule
from kvgen.lower.sources import Sources
from kvgen.measure.inputs import NoRoom, WorkloadInputs
from kvgen.measure.job import TimingPolicy
from kvgen.measure.read_roofline import read_roofline
from kvgen.reference.tolerance import relative_l2, tolerance
from kvgen.registry.default import with_defaults
from kvgen.registry.entry import Entry
from kvgen.registry.modules import modules
from kvgen.registry.select import select
from kvgen.runtime.module import load
from kvgen.runtime.variant import Variant
from kvgen.spec import KernelSpec, Workload, load_spec
from kvgen.spec.dispatch import Dispatch, Measured
from kvgen.spec.grid import Grid, grid_of
from kvgen.toolchain import ArtifactCache
from kvgen.tune.compile_queue import CompileQueue

ROOT = Path(__file__).resolve().parent.parent
POLICY = TimingPolicy(seconds=0.03, warmup_seconds=0.005, samples=7)
FINALISTS = 8
"""Launches of the search spaces that are timed in turns with the entry's, after all of them were timed once."""
COMPILING = 0.6
"""Of a spec's time, the most for compiling the launches of the search spaces."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """One kind of traffic: tokens of each sequence, and the load."""

    name: str
    lengths: tuple[int, ...]
    load: str = "rested"

    @property
    def equal(self) -> bool:
        """Whether all sequences are equally long."""
        return min(self.lengths) == max(self.lengths)

    @property
    def work(self) -> Workload:
        """The workload, for inputs that are given the lengths themselves."""
        return Workload(batch=len(self.lengths), kv_len=max(self.lengths), load="sustained" if self.load == "sustained" else "rested")


def named() -> list[Point]:
    """The rows that the project's goals name."""
    points = [Point("64x1000", (1000,) * 64), Point("256x1998", (1998,) * 256)]
    ragged = {"128 of .2K to 16K": (128, 200, 16384), "48 of .3K to 24K": (48, 300, 24576)}
    points += [Point(name, tuple(_drawn(*shape, random.Random(7)))) for name, shape in ragged.items()]
    points.append(Point("128K beside 63 of 1K", (131072, *(1024,) * 63)))
    shapes = ((8, 32768), (32, 8192), (128, 8192))
    return points + [Point(f"{batch}x{length}", (length,) * batch, load) for batch, length in shapes for load in ("rested", "sustained")]


def between(grid: Grid, most_tokens: int, seed: int, stride: int) -> list[Point]:
    """Points in the middles of the grid's meshes, each with equal and with unequal lengths; every `stride`-th."""
    draw, points = random.Random(seed), []
    batches = sorted({1, *(round(batch * math.sqrt(2)) for batch in grid.batches[1:])})
    for batch in batches:
        for length in (round(length * math.sqrt(2)) for length in grid.lengths):
            if batch * length > min(most_tokens, grid.most_tokens):
                continue
            points.append(Point(f"{batch}x{length}", (length,) * batch))
            if batch > 1:
                drawn = _drawn(batch, max(1, length // 12), length * 3, draw)
                points.append(Point(f"{batch} of {min(drawn)} to {max(drawn)}", tuple(drawn)))
    return points[seed % stride :: stride]


def _drawn(batch: int, low: int, high: int, draw: random.Random) -> list[int]:
    """Log-uniform lengths with the longest among them, drawn one by one: other ones than a workload's, which are evenly spread."""
    lengths = [int(math.exp(draw.uniform(math.log(low), math.log(high)))) for _ in range(batch)]
    lengths[batch // 2] = high
    return lengths


def under(spec: KernelSpec, load: str) -> KernelSpec:
    """A spec that says of all its traffic that it is under such a load."""
    return load_spec(spec.to_json() | {"workloads": [work.to_json() | {"load": load} for work in spec.workloads]})


class Launches:
    """The launches of one entry, and further ones over its layout as they are compiled."""

    def __init__(self, spec: KernelSpec, entry: Entry) -> None:
        self.spec, self.entry = spec, entry
        paths = modules(entry)
        self.own = [(entry.schedule(launch), self._load(paths[launch.file])) for launch in entry.every_launch]
        tuned = [Measured(launch.workload, index) for index, launch in enumerate(entry.launches) if isinstance(launch.workload, Workload)]
        self._nearest = Dispatch(tuned)
        self.look_ups = {load: entry.look_up(under(spec, load)) for load in ("rested", "sustained")}
        self._spaces = {b.name: b.space(spec, entry.arch) for b in backends_for(entry.arch) if refusal(b, spec, entry.arch) is None}
        self._variants: dict[Schedule, Variant | None] = dict(self.own)
        """None: it does not compile."""

    def _load(self, path: Path) -> Variant:
        return Variant(self.spec, self.entry.packed, load(path))

    def queue(self) -> CompileQueue:
        """Compilers for launches of the search spaces; TileLang takes seconds to lower each, which they do, too."""
        sources = Sources(self.spec, self.entry.arch, {b.name: b for b in backends_for(self.entry.arch)})
        return CompileQueue(sources, ArtifactCache(), max(1, processors() - 2))  # what launches the timed kernels must not wait for one

    def serving(self, point: Point, *, known: bool = True) -> int:
        """Index of the launch that a call takes, where the host knows the tokens, or their bound alone, and the spec the load."""
        return self.look_ups[point.load].launch(len(point.lengths), max(point.lengths), 1, sum(point.lengths) if known else None)

    def nearest(self, point: Point) -> int:
        """Index of the launch that was tuned for the nearest workload."""
        return self._nearest.launch(len(point.lengths), max(point.lengths), 1, sum(point.lengths))

    def space(self, work: Workload) -> list[Schedule]:
        """Every launch over the layout that a search would try at a workload."""
        layout = self.entry.layout
        return [Schedule(name, layout, launch) for name, space in self._spaces.items() for launch in space.launches(layout, work)]

    def take(self, schedules: Sequence[Schedule], queue: CompileQueue, until: float) -> None:
        """Make variants of what is compiled by `until` (of `time.monotonic`); what does not compile is told."""
        fresh = [schedule for schedule in dict.fromkeys(schedules) if schedule not in self._variants]
        for schedule in queue.done(fresh, max(0.0, until - time.monotonic())):
            try:
                self._variants[schedule] = self._load(queue.artifact(schedule).path)
            except (CompileError, CompilerCrash, UnsupportedError) as error:  # noqa: PERF203 - the others go on
                self._variants[schedule] = None
                print(f"- {schedule}: {error}", flush=True)

    def known(self, schedules: Sequence[Schedule]) -> bool:
        """Whether all of them have been compiled, or cannot be."""
        return all(schedule in self._variants for schedule in schedules)

    def at(self, point: Point, *, whole: bool) -> dict[Schedule, Variant]:
        """The launches that take part at a point: the entry's, and if `whole` those of the search spaces."""
        chosen = [schedule for schedule, _ in self.own] + (self.space(point.work) if whole else [])
        return {schedule: variant for schedule in chosen if (variant := self._variants.get(schedule)) is not None}


def measure(launches: Launches, point: Point, rounds: int, *, whole: bool) -> Row | None:
    """Times of all launches at a point, in turns; None where the memory cannot hold its caches."""
    entry, target = launches.entry, launches.entry.arch
    serving = launches.serving(point)
    served_by, first = launches.own[serving]
    try:
        inputs = WorkloadInputs(first, point.work, device_type(target), None, point.lengths)
    except NoRoom as error:
        print(f"- {launches.spec.name} {point.name}: {error}", flush=True)
        return None
    want = first.attend(inputs.q, inputs.caches[0], sinks=inputs.sinks)
    entrants = {s: variant for s, variant in launches.at(point, whole=whole).items() if _agrees(s, variant, want, inputs)}
    candidates, own = len(entrants), {schedule for schedule, _ in launches.own}
    if whole:
        once = {schedule: median(inputs.time(variant, POLICY)) for schedule, variant in entrants.items() if schedule not in own}
        best = sorted(once, key=lambda schedule: once[schedule])[:FINALISTS]
        entrants = {schedule: variant for schedule, variant in entrants.items() if schedule in own or schedule in best}
    found, reads = take_turns(
        {schedule: partial(inputs.time, variant, POLICY) for schedule, variant in entrants.items()},
        rounds,
        {inputs.nbytes: partial(read_roofline(target).samples, inputs.nbytes, POLICY.under(point.work.load))},
    )
    power = None
    if point.load == "sustained":  # the last one timed is not the one that serves
        inputs.time(first, POLICY)
        power = inputs.power
    times = {schedule: median(samples) for schedule, samples in found.items()}
    default = entry.dispatch.default if entry.dispatch else 0
    own_us = [times.get(schedule) for schedule, _ in launches.own]
    unknown = None if point.equal else launches.serving(point, known=False)
    default_us, unknown_us = own_us[default], None if unknown is None else own_us[unknown]
    us, read = times[served_by], median(reads[inputs.nbytes])
    best_of_all, best_own = min(times, key=lambda s: times[s]), min(own & times.keys(), key=lambda s: times[s])
    return {
        "spec": launches.spec.name, "point": point.name, "traffic": point.load, "batch": len(point.lengths), "longest": max(point.lengths),
        "tokens": sum(point.lengths), "launch": serving, "us": round(us, 3), "best_own_us": round(times[best_own], 3),
        "regret_own": round(us / times[best_own], 4), "candidates": candidates, "best_us": round(times[best_of_all], 3),
        "regret": round(us / times[best_of_all], 4), "best_launch": str(best_of_all),
        "default_us": _rounded(default_us, 3), "own_us": json.dumps([_rounded(time, 3) for time in own_us]),
        "nearest_us": _rounded(own_us[launches.nearest(point)], 3),
        "launch_unknown": unknown, "regret_unknown": _rounded(unknown_us and unknown_us / times[best_of_all], 4),
        "bytes": inputs.nbytes, "read_us": round(read, 3), "read_fraction": round(read / us, 4),
        "watts": power.watts if power else None, "clock_mhz": power.clock_mhz if power else None, "whole": whole,
    }  # fmt: skip


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _agrees(schedule: Schedule, variant: Variant, want: torch.Tensor, inputs: WorkloadInputs) -> bool:
    """Whether a launch computes the same as the one that serves; told if not."""
    out = variant.attend(inputs.q, inputs.caches[0], sinks=inputs.sinks)
    variant.release(inputs.caches[0])
    error = relative_l2(out, want)
    if error <= 2 * tolerance(variant.spec.attention.dtype):  # each may be as far as that from the reference
        return True
    print(f"- {schedule}: WRONG at {inputs.workload.key} ({error:.1e})", flush=True)
    return False


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Worst regret and geometric mean of each spec, against the launches of its entry and against the whole space; also of calls whose
    tokens the host does not know.
    """
    for spec in dict.fromkeys(row["spec"] for row in rows):
        mine = [row for row in rows if row["spec"] == spec]
        for title, column, chosen in (
            ("beside the entry's launches", "regret_own", mine),
            ("beside the whole space", "regret", [r for r in mine if r["whole"]]),
            ("with unknown tokens", "regret_unknown", [r for r in mine if r["regret_unknown"]]),
        ):
            if chosen:
                worst = max(chosen, key=lambda row: float(row[column]))
                mean = math.exp(sum(math.log(row[column]) for row in chosen) / len(chosen))
                yield (
                    f"{spec:24} {title:27} at {len(chosen):3} points: worst {worst[column]:.3f} "
                    f"({worst['point']}, {worst['traffic']}), geometric mean {mean:.3f}"
                )


def main() -> int:
    """Measure, print, write. 1 where a spec has no entry or nothing was measured."""
    command = parser(__doc__)
    command.add_argument("specs", nargs="*", default=[str(ROOT / "examples" / f"{name}.yaml") for name in PLANES], help="spec files")
    command.add_argument("--target", default="sm90")
    command.add_argument("--seconds", type=float, default=300.0, help="of all specs together, after which no point is begun")
    command.add_argument("--whole", type=int, default=4, help="points with every launch of the search spaces")
    command.add_argument("--stride", type=int, default=2, help="every how many points")
    command.add_argument("--seed", type=int, default=1)
    command.add_argument("--most-tokens", type=int, default=1 << 22)
    command.add_argument("--named-only", action="store_true")
    command.add_argument("--no-named", action="store_true")
    add_rounds(command)
    command.set_defaults(rounds=5)
    options = command.parse_args()
    end, rows, good = time.monotonic() + options.seconds, list[Row](), True
    for number, file in enumerate(options.specs):
        spec = load_spec(Path(file))
        stored = select(spec, options.target).entry
        if stored is None:
            print(f"{spec.name} has no entry for {options.target}: kvgen build {file}", file=sys.stderr)
            good = False
            continue
        entry = with_defaults(stored)
        points = [] if options.named_only else between(grid_of(entry.arch), options.most_tokens, options.seed, options.stride)
        random.Random(options.seed).shuffle(points)
        whole = points[: options.whole]
        points = ([] if options.no_named else named()) + points[options.whole :]
        seconds = (end - time.monotonic()) / (len(options.specs) - number)
        mine = run(Launches(spec, entry), points, whole, options.rounds, seconds)
        good, rows = good and bool(mine), rows + mine
    print("\n".join(summary(rows)))
    return 0 if good else 1


def run(launches: Launches, points: Sequence[Point], whole: Sequence[Point], rounds: int, seconds: float) -> list[Row]:
    """The rows of one spec, as many as fit into the time, `whole` points first: those whose launches could be compiled."""
    began, rows = time.monotonic(), list[Row]()
    plane = f"plane.{launches.spec.name}"
    name = f"cpu_{plane}" if launches.entry.arch == "cpu" else of_gpu(plane)

    def one(point: Point, *, with_space: bool) -> None:
        row = measure(launches, point, rounds, whole=with_space)
        torch.cuda.empty_cache()
        if row is not None:
            rows.append(row)
            write_rows(name, rows, facts(launches.entry.arch, POLICY))
            print(
                f"{row['spec']:24}{row['point']:24}{row['traffic']:10}{row['us']:10.2f} µs  {row['read_fraction']:.3f} of the read  "
                f"regret {row['regret']:.3f} of {row['candidates']}",
                flush=True,
            )

    spaces = {point: launches.space(point.work) for point in whole}
    with launches.queue() as queue:
        launches.take(list(chain.from_iterable(spaces.values())), queue, began + COMPILING * seconds)
    compiled = [point for point, space in spaces.items() if launches.known(space)]
    left = [point for point in whole if point not in compiled]
    for point in (*compiled, *points):
        if time.monotonic() < began + seconds:
            one(point, with_space=point in compiled)
        else:
            left.append(point)
    if left:
        print(f"{launches.spec.name}: not measured for want of time: {', '.join(point.name for point in left)}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
