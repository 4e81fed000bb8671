"""Checks a whole registry: every entry, then its files; and accepts changes on request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvgen.errors import KvgenError
from kvgen.lower.backend import Source
from kvgen.measure.worker import Worker
from kvgen.registry.entry import Entry
from kvgen.registry.manifest import MANIFEST
from kvgen.registry.store import Store
from kvgen.toolchain import ArtifactCache
from kvgen.toolchain.compile import build_all
from kvgen.tune.regression.entry import check_entry
from kvgen.tune.regression.finding import FAILING, Checked, Finding
from kvgen.tune.regression.registry import RegistryFiles
from kvgen.tune.regression.source import render

REGISTRY = "(registry)"
"""The key of a finding about a whole registry that cannot be read or written."""


@dataclass(frozen=True)
class Result:
    """The findings of an entry or a file, its registry, whether a regression was accepted, and whether the store has the renewed entry."""

    checked: Checked
    registry: str
    accepted: bool = False
    renewed: bool = False

    @property
    def bad(self) -> bool:
        """Whether it is damaged or regressed, and still is."""
        return self.checked.verdict in FAILING and not self.accepted

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**self.checked.to_json(), "registry": self.registry, "accepted": self.accepted}


def check_registry(
    files: RegistryFiles,
    worker: Worker,
    *,
    keys: Sequence[str] = (),
    archs: Sequence[str] = (),
    speed: bool = False,
    accept: bool = False,
    compiling: Callable[[int], object],
) -> Iterator[Result]:
    """Check entries whose key begins with one of `keys` and whose target is one of `archs` (any where there are none), one by one.

    What has to be compiled for them is compiled before, in parallel; `compiling` is called with the number of modules, if there are any.
    `accept` writes those of them that render and compile into the store, and brings its manifest up to date for them; for files that belong
    to no entry only where no entries were selected.
    """
    wanted = partial(_wanted, tuple(keys))
    chosen = [one.entry for one in files.found if one.entry is not None and wanted(one.key) and (not archs or one.entry.arch in archs)]
    compile_ahead(chosen, compiling)
    good = set() if keys or archs else {""}
    for entry in chosen:
        checked = check_entry(entry, speed=speed, worker=worker)
        result = _accept(files.store, checked) if accept else Result(checked, files.store.name)
        if result.renewed and not result.bad:
            good.add(entry.key)
        yield result
    yield from (Result(checked, files.store.name) for checked in files.entry_problems(wanted))
    accepted: set[str] = set()
    if accept:
        try:
            accepted = files.accept(good.__contains__)
        except (KvgenError, OSError) as error:
            yield unreachable(files.store.name, error)
    for file, checked in files.manifest_problems(wanted).items():
        yield Result(checked, files.store.name, accepted=file in accepted)


def compile_ahead(entries: Iterable[Entry], compiling: Callable[[int], object]) -> None:
    """Compile the present sources of entries in parallel, until one fails: the check of its entry names the failure."""
    sources: list[Source] = []
    for entry in entries:
        with suppress(Exception):  # templates raise exceptions of many kinds
            sources += render(entry).values()
    with suppress(KvgenError):
        build_all(sources, ArtifactCache(), compiling)


def unreachable(registry: str, error: Exception) -> Result:
    """A registry that this machine cannot read or write."""
    return Result(Checked(REGISTRY, (_cannot(error),)), registry)


def summary(results: Sequence[Result], *, accept: bool = False) -> str:
    """One line: the number of entries by verdict, and what was not checked, with the reasons."""
    entries = Counter(one.checked.verdict for one in results if one.checked.key not in (MANIFEST, REGISTRY))
    count = sum(entries.values())
    told = f"{count} {'entry' if count == 1 else 'entries'}, "
    told += f"{entries['good']} good, {entries['regressed']} regressed, {entries['unable']} unable"
    told += f", {entries['damaged']} damaged" if entries["damaged"] else ""
    if differing := sum(one.checked.key == MANIFEST for one in results):
        told += f", files not as the manifest lists them: {differing}"
    if accept:
        told += f"; of these accepted: {sum(one.accepted for one in results)}"
    missed = Counter((found.aspect, found.detail) for one in results for found in one.checked.findings if found.status == "unable")
    reasons = [f"{aspect} of {count} ({detail})" for (aspect, detail), count in missed.items()]
    return told + (f"; not checked: {', '.join(reasons)}" if reasons else "")


def _wanted(keys: tuple[str, ...], key: str) -> bool:
    return not keys or key.startswith(keys)


def _accept(store: Store, checked: Checked) -> Result:
    """Replace the entry by what renders and compiles now, if that is allowed."""
    renewed: Entry | None = checked.renewed
    if renewed is None:
        return Result(checked, store.name)
    try:
        if renewed != checked.entry:
            store.put(renewed)
    except (KvgenError, OSError) as error:
        return Result(replace(checked, findings=(*checked.findings, _cannot(error))), store.name)
    return Result(checked, store.name, accepted=checked.regressed, renewed=True)


def _cannot(error: Exception) -> Finding:
    return Finding("registry", "unable", str(error), environment=True)
