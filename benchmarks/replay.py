"""How many trials samplers take to come within 2 % of the best schedule, replayed over tables of all schedules.

    python -m benchmarks.replay TABLE.csv… [--seeds 50] [--ahead 1] [--random-start] [--picture FILE.svg]

A table is of `benchmarks.exhaustive`.
Every workload is searched by itself, from the default schedule on (of the column `default`; with `--random-start` from any), by

- build: `kvgen build`'s order, by the expected improvement of a Gaussian process;
- tpe: in turns Optuna's TPE and the best so far, moved to the nearest schedule that is valid and untried;
- evolution: Optuna's NSGA-II over the whole product of the parameters, up to 2,000 draws; what is invalid or was tried costs it nothing;
- random: a random order.

`--ahead`: measurements that are under way when the next schedule is chosen, as compilers that run in parallel have them. Prints a row per
workload: the schedules; the default's and the median time over the least; the median number of trials by sampler. A picture has the median
of the best time so far over the least, by trials, of workloads at which a random order takes 16 or more.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import NSGAIISampler, TPESampler
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState, create_trial

from kvgen.lower.schedule import Params, Schedule, Value
from kvgen.lower.space import Parameter
from kvgen.measure.measurement import Candidate
from kvgen.spec import Workload
from kvgen.tune.storage import Axis, Study, flatten

CLOSE = 1.02
DRAWS = 2000
SOON = 16
BACKEND = "table"
WORK = Workload(batch=1, kv_len=1)


@dataclass(frozen=True)
class Table:
    """The times of one workload."""

    name: str
    costs: dict[Schedule, float]
    """µs; infinite for a failure."""
    default: Schedule

    @cached_property
    def parameters(self) -> list[Parameter]:
        """Numbers in their order, other values as they come."""
        values: dict[str, dict[Value, None]] = {}
        for schedule in self.costs:
            for name, value in flatten(schedule).items():
                values.setdefault(name, {})[value] = None
        order = {name: sorted(found) if all(type(one) is int for one in found) else list(found) for name, found in values.items()}
        return [Parameter(name.partition(".")[2], name.partition(".")[0], tuple(found), "") for name, found in order.items()]  # type: ignore[arg-type]

    @cached_property
    def best(self) -> float:
        return min(self.costs.values())

    @cached_property
    def axes(self) -> dict[str, Axis]:
        return {f"{parameter.part}.{parameter.name}": Axis(parameter.values) for parameter in self.parameters}

    @cached_property
    def distributions(self) -> dict[str, BaseDistribution]:
        return {name: axis.distribution for name, axis in self.axes.items()}

    @cached_property
    def stored(self) -> dict[Schedule, dict[str, Value]]:
        """Of each schedule, what a trial has of it."""
        flat = {one: flatten(one) for one in self.costs}
        return {one: {name: axis.stored(has[name]) for name, axis in self.axes.items()} for one, has in flat.items()}

    def far(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
        """A value that differs adds 1, and a number also its steps, as a share of all its steps."""
        far = 0.0
        for name, axis in self.axes.items():
            if one[name] != other[name]:
                far += 1.0 + (abs(one[name] - other[name]) / (len(axis.values) - 1) if axis.ordinal else 0.0)
        return far


def tables(file: Path) -> Iterator[Table]:
    """Of each workload of a file."""
    with file.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    params = [name for name in rows[0] if name.startswith(("layout.", "launch."))]
    for work in [name for name in rows[0] if name not in (*params, "passes", "default")]:
        costs, default = {}, None
        for row in rows:
            schedule = unflatten(BACKEND, {name: _value(row[name]) for name in params})
            if us := float(row[work]):
                costs[schedule] = us
            if work in row.get("default", "").split():
                default = schedule
        if costs:
            yield Table(f"{file.stem} {work}", costs, default or next(iter(costs)))


def unflatten(backend: str, params: Mapping[str, Value]) -> Schedule:
    """Inverse of `flatten`."""

    def part(prefix: str) -> Params:
        return Params({name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)})

    return Schedule(backend, part("layout."), part("launch."))


def _value(text: str) -> Value:
    return {"True": True, "False": False}.get(text, int(text) if text.lstrip("-").isdigit() else text)


Order = Iterator[Schedule]


def by_study(table: Table, seed: int, ahead: int) -> Order:
    study = Study(InMemoryStorage(), "replay", list(table.costs), table.parameters, seed)
    study.claim(table.default)
    pending = [table.default]
    while pending:
        schedule = pending.pop(0)
        study.finish(Candidate(schedule, WORK).measured("ok", samples=(table.costs[schedule],)))
        yield schedule
        while study.left and len(pending) < ahead:
            pending.append(study.propose())
            study.claim(pending[-1])


def by_tpe(table: Table, seed: int, _: int) -> Order:
    sampler, draw = TPESampler(seed=seed, multivariate=True, n_startup_trials=16), random.Random(seed)
    study, chosen, best, todo = optuna.create_study(sampler=sampler), table.default, table.default, dict.fromkeys(table.costs)
    while True:
        yield chosen
        del todo[chosen]
        study.add_trial(create_trial(params=table.stored[chosen], distributions=table.distributions, value=table.costs[chosen]))
        best = min(best, chosen, key=table.costs.__getitem__)
        if not todo:
            return
        there: Mapping[str, Any] = table.stored[best]
        if len(todo) % 2:
            drawn = study.ask(table.distributions)
            study.tell(drawn, state=TrialState.FAIL)
            there = drawn.params
        far = {one: table.far(table.stored[one], there) for one in todo}
        least = min(far.values()) + 1e-9
        chosen = draw.choice([one for one, distance in far.items() if distance <= least])


def by_evolution(table: Table, seed: int, _: int) -> Order:
    study = optuna.create_study(sampler=NSGAIISampler(seed=seed, population_size=16))
    at = {tuple(has.values()): schedule for schedule, has in table.stored.items()}
    seen = {table.default}
    yield table.default
    study.enqueue_trial(table.stored[table.default])
    for _ in range(DRAWS):
        trial = study.ask(table.distributions)
        schedule = at.get(tuple(trial.params[name] for name in table.axes))
        if schedule is None:
            study.tell(trial, state=TrialState.PRUNED)
            continue
        study.tell(trial, table.costs[schedule])
        if schedule not in seen:
            seen.add(schedule)
            yield schedule


def by_random(table: Table, seed: int, _: int) -> Order:
    todo = [one for one in table.costs if one != table.default]
    random.Random(seed).shuffle(todo)
    yield from [table.default, *todo]


SAMPLERS: dict[str, Callable[[Table, int, int], Order]] = {
    "build": by_study, "tpe": by_tpe, "evolution": by_evolution, "random": by_random,
}  # fmt: skip
LABELS = {"build": "kvgen build", "tpe": "TPE and nearest in turns", "evolution": "evolution (NSGA-II)", "random": "random"}


def run(table: Table, sampler: str, seed: int, ahead: int, curve: int = 0) -> tuple[int, list[float]]:
    """Trials until the best is near, and the best time so far over the least after each of the first `curve` trials."""
    best, reached, ratios = math.inf, 0, []
    for number, schedule in enumerate(SAMPLERS[sampler](table, seed, ahead), 1):
        best = min(best, table.costs[schedule])
        ratios.append(best / table.best)
        if not reached and best <= CLOSE * table.best:
            reached = number
        if reached and number >= curve:
            break
    return reached or len(table.costs), (ratios + ratios[-1:] * curve)[:curve]


def main() -> None:
    """The command."""
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("tables", nargs="+", type=Path)
    command.add_argument("--seeds", type=int, default=50)
    command.add_argument("--ahead", type=int, default=1)
    command.add_argument("--random-start", action="store_true")
    command.add_argument("--picture", type=Path)
    given = command.parse_args()
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of TPE over several parameters at once
    curves: dict[str, dict[str, list[float]]] = {}
    print("table", "schedules", "near the best", "default", "median", *SAMPLERS, sep="\t")
    for file in given.tables:
        for table in tables(file):
            near, counts = sum(us <= CLOSE * table.best for us in table.costs.values()), []
            length = min(len(table.costs), 64) if given.picture else 0
            for name in SAMPLERS:
                drawn = (replace(table, default=random.Random(seed).choice(list(table.costs))) for seed in range(given.seeds))
                starts = drawn if given.random_start else [table] * given.seeds
                runs = [run(start, name, seed, given.ahead, length) for seed, start in enumerate(starts)]
                counts.append(median(reached for reached, _ in runs))
                curves.setdefault(table.name, {})[name] = [median(each) for each in zip(*(ratios for _, ratios in runs), strict=True)]
            if counts[-1] < SOON:
                del curves[table.name]
            over = (f"{us / table.best:.3f}" for us in (table.costs[table.default], median(table.costs.values())))
            print(table.name, len(table.costs), near, *over, *(f"{count:g}" for count in counts), sep="\t", flush=True)
    if given.picture and curves:
        draw(curves, given.picture)


def draw(curves: dict[str, dict[str, list[float]]], file: Path) -> None:
    """A panel for each table."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    figure = Figure((4.2 * columns, 3.0 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for panel, (table, lines) in zip(panels, curves.items(), strict=False):
        for name, ratios in lines.items():
            panel.step(range(1, len(ratios) + 1), ratios, where="post", label=LABELS[name], linewidth=1.2)
        panel.set(title=table, xlabel="trials", ylabel="best so far over the least", xscale="log", ylim=(1.0, None))
        panel.title.set_fontsize(9)
        panel.axhline(CLOSE, color="0.7", linewidth=0.7)
    panels = figure.axes
    panels[0].legend(fontsize=8)
    with mpl.rc_context({"svg.hashsalt": "kvgen", "svg.fonttype": "none"}):
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
