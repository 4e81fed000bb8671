"""The page of `kvgen report`: a summary of all entries, then a section for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import geometric_mean, median

from markupsafe import Markup

from kvgen.bench.results import Result
from kvgen.pages.course import WORST
from kvgen.pages.numbers import factor, fraction
from kvgen.pages.page import render as render_page
from kvgen.registry.entry import Entry
from kvgen.registry.facts import Failure
from kvgen.report.charts import Chart, courses, rooflines, strip
from kvgen.report.studies import StudyView, study_views
from kvgen.toolchain import ArtifactCache

TEMPLATE = "report/report.html.jinja"


@dataclass(frozen=True)
class Section:
    """What the page says of one entry."""

    entry: Entry
    results: Sequence[Result]
    studies: Sequence[StudyView]

    @cached_property
    def fractions(self) -> list[float]:
        """Read fractions of the tuned workloads."""
        return [timing.read_fraction for timing in self.entry.timings if timing.read_fraction is not None]

    @cached_property
    def gain(self) -> float | None:
        """Geometric mean of default over tuned time; None where no default was measured."""
        ratios = [timing.default_us / timing.us for timing in self.entry.timings if timing.default_us]
        return geometric_mean(ratios) if ratios else None

    @cached_property
    def rooflines(self) -> list[Chart]:
        """A chart per tuned workload."""
        return rooflines(self.entry, self.results)

    @cached_property
    def courses(self) -> list[Chart]:
        """A chart per workload that was searched."""
        return courses(self.studies)

    @property
    def strip(self) -> Markup:
        """Read fractions at a glance."""
        return strip(self.fractions)

    @property
    def trials(self) -> int:
        """Candidates of its searches."""
        return sum(study.trials for study in self.studies)

    @property
    def failures(self) -> list[tuple[str, Failure]]:
        """What failed in all searches, each with the workload."""
        return [(study.workload, failure) for study in self.studies for failure in study.failures]

    @property
    def failed(self) -> int:
        """Candidates of its searches that failed."""
        return sum(failure.count for study in self.studies for failure in study.failures)


def render(entries: Iterable[Entry], cache: ArtifactCache, results: Sequence[Result] = (), accuracy: str | None = None) -> str:
    """One self-contained HTML page. `results` are rows of `kvgen bench`, `accuracy` the address of a page about accuracy to link."""
    ordered = sorted(entries, key=lambda entry: (str(entry.device.get("name", "")), entry.spec.name, entry.key))
    sections = [Section(entry, results, study_views(entry, cache)) for entry in ordered]
    return render_page(TEMPLATE, sections=sections, tiles=_tiles(sections), accuracy=accuracy, worst=f"{WORST:g}")


def _tiles(sections: Sequence[Section]) -> list[tuple[str, str]]:
    """The summary: (number, what it counts)."""
    fractions = [one for section in sections for one in section.fractions]
    gains = [section.gain for section in sections if section.gain is not None]
    trials, failed = sum(section.trials for section in sections), sum(section.failed for section in sections)
    workloads = sum(len(section.entry.timings) for section in sections)
    devices = {str(section.entry.device.get("name", "")) for section in sections}
    found = [
        (f"{len(sections)}", f"{_many('entry', 'entries', len(sections))} on {len(devices)} {_many('device', 'devices', len(devices))}")
    ]
    found += [(f"{workloads}", _many("tuned workload", "tuned workloads", workloads))]
    found += [(fraction(median(fractions)), "median read fraction (1 is as fast as memory)")] if fractions else []
    found += [(factor(geometric_mean(gains)), "as fast as the default schedules, geometric mean")] if gains else []
    return found + ([(f"{trials}", f"candidates in the searches kept here, {failed} of them failed")] if trials else [])


def _many(one: str, more: str, count: int) -> str:
    return one if count == 1 else more
