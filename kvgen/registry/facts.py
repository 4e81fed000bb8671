"""What kvgen reads of an entry's facts: their shapes, by which they are validated with the entry. It keeps all facts as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvgen.plaindata import Json


@dataclass(frozen=True)
class Failure(Json):
    """Candidates of one back end that failed alike."""

    backend: str
    kind: str
    count: int
    example: str
    """The first of them: schedule and workload."""
    detail: str
    """What was said of it."""


@dataclass(frozen=True)
class Provenance(Json):
    """How an entry came to be."""

    date: str = ""
    why: str = ""
    tuned: bool | None = None


@dataclass(frozen=True)
class OutputErrors:
    """Of attention on one set of data."""

    relative_l2: float


@dataclass(frozen=True)
class Outputs:
    """Errors on seeded data (`kvgen.verify.quality.format_quality`)."""

    normal: OutputErrors
    structured: OutputErrors


@dataclass(frozen=True)
class Perplexity:
    """Of a small transformer at one length."""

    increase: float
    """As a fraction of the perplexity over an unquantized cache."""


@dataclass(frozen=True)
class Model:
    """Figures of a small transformer, by length in tokens (`kvgen accuracy --registered`)."""

    lengths: Mapping[int, Perplexity]


@dataclass(frozen=True)
class Quality(Json):
    """What a format costs; it is of the format, not of the device."""

    outputs: Outputs
    model: Model | None = None
