"""Results of a check: a finding per aspect, and one verdict per entry."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, computed_field

from kvgen.plaindata import Json
from kvgen.registry.entry import Entry

Aspect = Literal["registry", "source", "resources", "numerics", "speed"]
LEVELS: tuple[Aspect, ...] = ("source", "resources", "numerics", "speed")
"""Aspects of an entry, each of which depends on the previous ones. `registry` is about files: damaged, missing, not as listed."""

Status = Literal["good", "changed", "damaged", "regressed", "unable"]
Verdict = Literal["good", "damaged", "regressed", "unable"]
FAILING: tuple[Verdict, ...] = ("damaged", "regressed")
"""What a check fails for. Of a damaged entry nothing is known, so it is not called a regression."""


@dataclass(frozen=True)
class Finding(Json):
    """One aspect: unchanged (`good`), different and no worse (`changed`), worse (`regressed`), not checked (`unable`), or of files that
    cannot be read as an entry (`damaged`).

    `detail` says what differs, or why it was not checked or cannot be read.
    """

    aspect: Aspect
    status: Status
    detail: str = ""
    environment: bool = False
    """Whether it was not checked because this machine failed: a full disk, a missing or crashing compiler, a worker that does not start.
    False if only the device is missing."""


@dataclass(frozen=True)
class Checked(Json):
    """All findings of one entry, or of a file of a registry that belongs to none.

    `renewed` is the entry that `--accept` would write: the same schedules, rendered and compiled here. It is None where
    `get_kernel` would pass the entry over, and where the entry does not compile or is wrong.
    """

    key: str
    findings: tuple[Finding, ...]
    spec: str = ""
    arch: str = ""
    entry: Annotated[Entry | None, Field(exclude=True)] = field(default=None, repr=False)
    renewed: Annotated[Entry | None, Field(exclude=True)] = field(default=None, repr=False)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def regressed(self) -> bool:
        """Whether anything is worse than when the entry was made."""
        return any(finding.status == "regressed" for finding in self.findings)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def environment(self) -> bool:
        """Whether something was not checked because this machine failed."""
        return any(finding.environment for finding in self.findings)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> Verdict:
        """`damaged` or `regressed` if any aspect is, else `unable` if any was not checked, else `good`."""
        found = {finding.status for finding in self.findings}
        return next((verdict for verdict in (*FAILING, "unable") if verdict in found), "good")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def reason(self) -> str:
        """The first finding that makes the verdict; empty for a good entry."""
        return next((f"{f.aspect}: {f.detail}" for f in self.findings if f.status == self.verdict != "good"), "")
