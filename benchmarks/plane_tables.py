"""Tables of h200_plane.csv: what calls lose between the measured workloads, and the traffic that the project's goals name. The same of an
H100: of the entries of the H200 (h100_transfer.csv), and of the one that was built there (h100_plane.csv). Also of entries that were built
on an H100 and do not ship (h100_plane_builds.csv), of kernels that nothing was tuned for (h200_untuned.csv, h100_untuned.csv), and of
entries that were tuned at few workloads, with defaults beside them (h100_beside_tuned.csv).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

from benchmarks.figures import Row, figure, rows, table
from kvgen.pages.numbers import fraction

TITLES = {
    "serving-kv8": "int8", "serving-kv4": "int4", "serving-kv2": "int2", "llama31-8b-k8v4": "K8V4",
    "serving-kv4-paged": "int4, pages of 128", "default-kv4": "int4, no workloads named",
}  # fmt: skip
REGRETS = (
    "entry", "points", "worst regret", "geometric mean", "worst under load (points)", "worst with unknown tokens (points)",
    "worst of the plain schedule", "worst beside the whole space (points)",
)  # fmt: skip
SHIPPED = TITLES.keys() - {"default-kv4"}
TRAFFIC = {
    "64x1000": "64 × 1000", "256x1998": "256 × 1998", "128 of .2K to 16K": "128 of .2K to 16K tokens",
    "48 of .3K to 24K": "48 of .3K to 24K", "128K beside 63 of 1K": "one of 128K and 63 of 1K",
    "8x32768": "8 × 32768", "32x8192": "32 × 8192", "128x8192": "128 × 8192",
}  # fmt: skip


def regrets() -> str:
    """Regret of the launches that calls take, rested and under load, of calls whose tokens the host does not know, of the plain schedule if
    it served every call, and beside the whole search space.
    """
    measured = rows("h200_plane.csv")
    titles = dict(_titles(measured))
    shipped = {"the five that ship": SHIPPED} if titles.keys() >= SHIPPED else {}
    groups = {title: {spec} for spec, title in titles.items()} | shipped
    return table(REGRETS, [[title, *_regrets([row for row in measured if row["spec"] in specs])] for title, specs in groups.items()])


def transferred() -> str:
    """The same of an H100."""
    foreign = rows("h100_transfer.csv")
    groups = {f"{title}, built on an H200": [row for row in foreign if row["spec"] == spec] for spec, title in _titles(foreign)}
    groups["int4, built on an H100"] = rows("h100_plane.csv")
    return table(REGRETS, [[title, *_regrets(mine)] for title, mine in groups.items()])


def regrets_of_builds() -> str:
    """The same of entries that were built on an H100 and do not ship."""
    found = rows("h100_plane_builds.csv")
    return table(REGRETS, [[title, *_regrets([row for row in found if row["spec"] == spec])] for spec, title in _titles(found)])


def untuned() -> str:
    """Named traffic by kernels that nothing was tuned for, beside the fastest of all launches of the kernel and its plain one."""
    measured = rows("h200_untuned.csv")
    words = ["cache", "traffic", "time, µs (read fraction)", "over the fastest launch", "plain schedule, over it"]
    titles = dict(_titles(measured))
    named = [row for row in measured if row["point"] in TRAFFIC]
    served = [float(row["regret_own"]) for row in named]
    plain = [float(row["default_us"]) / float(row["best_own_us"]) for row in named]
    body = [
        [titles[row["spec"]], f"{TRAFFIC[row['point']]}{', sustained' if row['traffic'] == 'sustained' else ''}", _cell(row),
         f"{mine:.2f}", f"{others:.2f}"]
        for row, mine, others in zip(named, served, plain, strict=True)
    ]  # fmt: skip
    body += [
        [title, "", "", *(f"{of(column):.2f}" for column in (served, plain))]
        for title, of in (("geometric mean", geometric_mean), ("worst", max))
    ]
    return table(words, body)


def of_defaults() -> str:
    """What calls between the cells of the grid lose where defaults serve: with nothing tuned, and beside entries that were tuned at few
    workloads, where the launch tuned for the nearest one served before.
    """
    words = ["kernel", "points", "worst regret", "geometric mean", "the nearest tuned launch: worst", "geometric mean"]
    alone, beside = rows("h100_untuned.csv"), [row for row in rows("h100_beside_tuned.csv") if row["rule"] == "full waves"]
    groups = {f"{title}, untuned": [row for row in alone if row["spec"] == spec] for spec, title in _titles(alone)}
    groups |= {spec: [row for row in beside if row["spec"] == spec] for spec in dict.fromkeys(row["spec"] for row in beside)}
    body = []
    for name, mine in groups.items():
        nearest = [] if name.endswith("untuned") else [float(row["nearest_us"]) / float(row["best_own_us"]) for row in mine]
        told = [f"{of(nearest):.3f}" if nearest else "–" for of in (max, geometric_mean)]
        own = [float(row["regret_own"]) for row in mine]
        body.append([name, str(len(mine)), f"{max(own):.3f}", f"{geometric_mean(own):.3f}", *told])
    return table(words, body)


def _regrets(measured: Sequence[Row]) -> list[str]:
    """Cells of one line of the table."""
    rested = [row for row in measured if row["traffic"] == "rested"]
    own = [float(row["regret_own"]) for row in rested]
    load = [float(row["regret_own"]) for row in measured if row["traffic"] != "rested"]
    unknown = [float(row["regret_unknown"]) for row in rested if row["regret_unknown"]]
    default = [float(row["default_us"]) / float(row["best_own_us"]) for row in rested if row["default_us"]]
    mean = geometric_mean(own)
    whole = [float(row["regret"]) for row in rested if row["whole"] == "True"]
    return [str(len(own)), f"{max(own):.3f}", f"{mean:.3f}", _worst(load), _worst(unknown), f"{max(default):.2f}", _worst(whole)]


def _worst(regrets: Sequence[float]) -> str:
    return f"{max(regrets):.3f} ({len(regrets)})" if regrets else "–"


def traffic() -> str:
    """µs and read fraction of the named points."""
    return _traffic(rows("h200_plane.csv"))


def traffic_of_transferred() -> str:
    """The same of an H100, int4 by the entry that was built there."""
    return _traffic([row for row in rows("h100_transfer.csv") if row["spec"] != "serving-kv4"] + rows("h100_plane.csv"))


def _traffic(measured: Sequence[Row]) -> str:
    found = {(row["spec"], row["point"], row["traffic"]): row for row in measured}
    cells = [(point, load) for point in TRAFFIC for load in ("rested", "sustained") if any((s, point, load) in found for s in TITLES)]
    specs = dict(_titles(measured))
    body = [
        [f"{TRAFFIC[p]}{', sustained' if load == 'sustained' else ''}", *(_cell(found.get((s, p, load))) for s in specs)]
        for p, load in cells
    ]
    return table(["traffic", *specs.values()], body)


def _titles(measured: Sequence[Row]) -> list[tuple[str, str]]:
    """The specs that were measured, each with its title."""
    return [(spec, title) for spec, title in TITLES.items() if any(row["spec"] == spec for row in measured)]


def _cell(row: Row | None) -> str:
    return "–" if row is None else f"{figure(float(row['us']))} ({fraction(float(row['read_fraction']))})"
