"""Checks a whole registry: every entry and every file that holds none; and accepts changes on request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from kvgen.errors import KvgenError
from kvgen.lower.backend import Source
from kvgen.measure.worker import Worker
from kvgen.registry.store import Found, Store, format_name
from kvgen.toolchain import ArtifactCache
from kvgen.toolchain.compile import build_all
from kvgen.tune.regression.entry import FAILING, Checked, Finding, check_entry

REGISTRY = "(registry)"
"""The key of a finding about a whole registry that cannot be read or written."""


@dataclass(frozen=True)
class Result:
    """The findings of an entry or a file, its registry, and whether a regression was accepted."""

    checked: Checked
    registry: str
    accepted: bool = False

    @property
    def bad(self) -> bool:
        """Whether it is damaged or regressed, and still is."""
        return self.checked.verdict in FAILING and not self.accepted

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**self.checked.to_json(), "registry": self.registry, "accepted": self.accepted}


def check_registry(
    store: Store,
    every: Sequence[Found],
    worker: Worker,
    *,
    keys: Sequence[str] = (),
    archs: Sequence[str] = (),
    speed: bool = False,
    accept: bool = False,
    compiling: Callable[[int], object],
) -> Iterator[Result]:
    """Check the entries that a store holds (`Store.all`), one by one: those whose key begins with one of `keys` and whose target is one of
    `archs` (any where there are none).

    What has to be compiled for them is compiled before, in parallel; `compiling` is called with the number of modules, if there are any.
    `accept` writes those of them that render and compile into the store.
    """
    found = [one for one in every if not keys or one.key.startswith(tuple(keys))]
    chosen = [one.entry for one in found if one.entry is not None and (not archs or one.entry.arch in archs)]
    sources: list[Source] = []
    for entry in chosen:
        with suppress(Exception):  # templates raise exceptions of many kinds
            sources += entry.sources
    with suppress(KvgenError):  # the check of its entry names the failure
        build_all(sources, ArtifactCache(), compiling)
    for entry in chosen:
        checked = check_entry(entry, speed=speed, worker=worker)
        accepted = accept and checked.renewed is not None
        try:
            if accepted and checked.renewed is not None and checked.renewed != checked.entry:
                store.put(checked.renewed)
        except (KvgenError, OSError) as error:
            checked, accepted = replace(checked, findings=(*checked.findings, _cannot(error))), False
        yield Result(checked, store.name, accepted=accepted and checked.regressed)
    yield from (Result(problem, store.name) for one in found if (problem := file_problem(one)) is not None)


def file_problem(one: Found) -> Checked | None:
    """What is wrong with a file, whatever its entry is: it is damaged, or `get_kernel` does not look for it under its name."""
    if one.entry is None:
        return Checked(one.key, (Finding("registry", "damaged", f"{one.path.parent.name}/{one.path.name}: {one.problem}"),))
    if one.path.name.partition(".")[0] == (name := format_name(one.entry.spec)):
        return None
    return Checked(one.key, (Finding("registry", "regressed", f"get_kernel looks for it as {name}.json, and it is {one.path.name}"),))


def unreachable(registry: str, error: Exception) -> Result:
    """A registry that this machine cannot read or write."""
    return Result(Checked(REGISTRY, (_cannot(error),)), registry)


def summary(results: Sequence[Result], *, accept: bool = False) -> str:
    """One line: the number of entries by verdict, and what was not checked, with the reasons."""
    entries = Counter(one.checked.verdict for one in results if one.checked.key != REGISTRY)
    count = sum(entries.values())
    told = f"{count} {'entry' if count == 1 else 'entries'}, "
    told += f"{entries['good']} good, {entries['regressed']} regressed, {entries['unable']} unable"
    told += f", {entries['damaged']} damaged" if entries["damaged"] else ""
    if accept:
        told += f"; of these accepted: {sum(one.accepted for one in results)}"
    missed = Counter((found.aspect, found.detail) for one in results for found in one.checked.findings if found.status == "unable")
    reasons = [f"{aspect} of {count} ({detail})" for (aspect, detail), count in missed.items()]
    return told + (f"; not checked: {', '.join(reasons)}" if reasons else "")


def _cannot(error: Exception) -> Finding:
    return Finding("registry", "unable", str(error), environment=True)
