"""All aspects of one entry, each checked once, when it is requested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from kvgen.lower.backend import Source
from kvgen.measure.worker import Worker
from kvgen.registry.entry import Entry
from kvgen.registry.modules import tuned_module
from kvgen.runtime.device import cannot_run_here
from kvgen.spec import AnyWorkload
from kvgen.toolchain import Artifact, ArtifactCache, build
from kvgen.tune.regression.claims import impossible
from kvgen.tune.regression.failure import failed
from kvgen.tune.regression.finding import LEVELS, Aspect, Checked, Finding
from kvgen.tune.regression.numerics import check_numerics
from kvgen.tune.regression.resources import compare_resources
from kvgen.tune.regression.source import compare_sources, passed_over, render
from kvgen.tune.regression.speed import check_speed, other_device


def check_entry(entry: Entry, cache: ArtifactCache | None = None, *, speed: bool = False, worker: Worker | None = None) -> Checked:
    """Check an entry. An aspect that this machine cannot check is `unable`, and why. `worker` runs modules (a new one by default)."""
    with nullcontext(worker) if worker is not None else Worker() as runner:
        check = EntryCheck(entry, cache or ArtifactCache(), runner)
        findings = tuple(check.find(level) for level in LEVELS if speed or level != "speed")
        return Checked(entry.key, findings, entry.spec.name, entry.arch, entry, check.renewed())


class EntryCheck:
    """The check of one entry; `find` returns one aspect, after checking those that it depends on."""

    def __init__(self, entry: Entry, cache: ArtifactCache, worker: Worker) -> None:
        self.entry = entry
        self._cache, self._worker = cache, worker
        self._found: dict[Aspect, Finding] = {}
        self._rendered: dict[str, Source] | None = None
        self._built: dict[str, Artifact] | None = None
        self._passed_over = False

    def find(self, level: Aspect) -> Finding:
        """The finding of one of LEVELS."""
        if level not in self._found:
            looks = {"source": self._source, "resources": self._resources, "numerics": self._numerics, "speed": self._speed}
            self._found[level] = looks[level]()
        return self._found[level]

    def renewed(self) -> Entry | None:
        """The entry as it renders and compiles now; None if `get_kernel` would not use it, if it is damaged or does not compile, or if it
        is wrong or was not verified although this machine has the device.
        """
        numbers = self.find("numerics")
        if (
            self._passed_over
            or self.find("source").status == "damaged"
            or self._rendered is None
            or self._built is None
            or numbers.status == "regressed"
            or numbers.environment
        ):
            return None
        launches: list[tuple[AnyWorkload, Any, Source, Artifact | None]] = [
            (launch.workload, self.entry.schedule(launch), self._rendered[launch.file], self._built[launch.file])
            for launch in self.entry.every_launch
        ]
        tuned = len(self.entry.launches)
        fresh = Entry.of(self.entry.spec, self.entry.arch, launches[:tuned], launches[tuned:], device=self.entry.device)
        return replace(self.entry, launches=fresh.launches, codes=fresh.codes, further=fresh.further)

    def _source(self) -> Finding:
        found, reason = self._compared(), impossible(self.entry)
        return found if reason is None else Finding("source", "damaged", reason)

    def _compared(self) -> Finding:
        try:
            reason = passed_over(self.entry)
            self._passed_over = reason is not None
            self._rendered = render(self.entry)
        except Exception as error:  # templates raise exceptions of many kinds
            return failed("source", error, "it does not render any more") if not self._passed_over else _passed_over(reason)
        return _passed_over(reason) if reason is not None else compare_sources(self.entry, self._rendered)

    def _resources(self) -> Finding:
        self.find("source")
        if self._rendered is None:
            return Finding("resources", "unable", "there is no source to compile")
        try:
            self._built = {file: build(source, self._cache) for file, source in self._rendered.items()}
        except Exception as error:
            return failed("resources", error, "it does not compile any more")
        return compare_resources(self.entry, {file: artifact.resources for file, artifact in self._built.items()})

    def _numerics(self) -> Finding:
        self.find("resources")
        if self._built is None:
            return Finding("numerics", "unable", "there is no module to run")
        if (reason := cannot_run_here(self.entry.arch)) is not None:
            return Finding("numerics", "unable", reason)
        try:
            found = [check_numerics(entry, modules, self._worker) for entry, modules in self._modules(self._built) if modules]
            return next((one for one in found if one.status != "good"), found[0])
        except Exception as error:
            return failed("numerics", error, "it cannot be verified any more")

    def _modules(self, built: Mapping[str, Artifact]) -> Iterator[tuple[Entry, Mapping[str, Artifact]]]:
        """All modules that `get_kernel` may serve: the entry's own as they compile now, and those that it was tuned as where they are
        others.
        """
        yield self.entry, built
        tuned = {file: tuned_module(self.entry, code, self._cache) for file, code in self.entry.codes.items()}
        yield self.entry, {file: one for file, one in tuned.items() if one is not None and one.sha256 != built[file].sha256}

    def _speed(self) -> Finding:
        numbers = self.find("numerics")
        if self._built is None or numbers.status != "good":
            return Finding("speed", "unable", numbers.detail if numbers.status == "unable" else "its numbers are wrong")
        if (reason := other_device(self.entry)) is not None:
            return Finding("speed", "unable", reason)
        try:
            return check_speed(self.entry, self._built, self._cache, self._worker)
        except Exception as error:
            return failed("speed", error, "it cannot be timed any more")


def _passed_over(reason: str | None) -> Finding:
    return Finding("source", "regressed", f"get_kernel passes it over: {reason}")
