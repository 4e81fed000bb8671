"""The interface of back ends, and the source that lowering returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from kvgen.arch import Target
from kvgen.digest import digest, files_digest
from kvgen.lower.functions import FUNCTIONS as FUNCTIONS
from kvgen.lower.functions import MATRIX_FUNCTIONS as MATRIX_FUNCTIONS
from kvgen.lower.schedule import Schedule
from kvgen.spec import AnySpec, AnyWorkload, MatrixSpec
from kvgen.spec.dispatch import Tiling

if TYPE_CHECKING:  # fetching a kernel searches nothing
    from kvgen.lower.space import SearchSpace

Language = Literal["c++", "cuda"]


S = TypeVar("S", contravariant=True)


def functions_of(spec: AnySpec) -> tuple[str, ...]:
    """Functions that a module of a spec's operation exports."""
    return MATRIX_FUNCTIONS if isinstance(spec, MatrixSpec) else FUNCTIONS


@dataclass(frozen=True)
class Source:
    """Rendered source of one variant, ready for a compiler."""

    text: str
    language: Language
    target: Target
    include: tuple[Path, ...] = ()
    """Include folders of kvgen's own headers; their contents are part of the identity."""
    flags: tuple[str, ...] = ()
    """Flags that this variant needs beyond the toolchain's own."""
    headers: tuple[Path, ...] = field(default=(), repr=False)
    """The headers that `text` reaches."""
    functions: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """Functions that the compiled module must export; not part of the identity, because `text` decides them."""

    @property
    def id(self) -> str:
        """Digest of text, headers, language, target and flags."""
        return digest([self.text, files_digest(self.headers), self.language, self.target, list(self.flags)])


class Lowering(Protocol[S]):
    """A way to lower specs of one kind. Answers depend on the arguments and the installation alone; none compiles or runs a kernel.

    Only `lower` may take long: TileLang lowers in a process of its own, and keeps what it made in the user's cache.
    """

    name: str
    targets: tuple[Target, ...]

    def missing(self) -> str | None:
        """What has to be installed before this back end can lower anything, in one clause; None if all is here."""
        ...

    def unsupported(self, spec: S, target: Target) -> str | None:
        """Why this back end cannot lower the spec for the target, whatever is installed, in one clause; None if it can."""
        ...

    def space(self, spec: S, target: Target) -> SearchSpace:
        """Parameters, their values for this spec and target, and constraints with reasons."""
        ...

    def defaults(self, spec: S, target: Target) -> tuple[Schedule, ...]:
        """At most four schedules of one layout that together are near the best for every call, with nothing measured. The first, the
        plain one, suits every workload of the spec. Raises UnsupportedError where none does.
        """
        ...

    def default(self, spec: S, target: Target, work: AnyWorkload | None = None) -> Schedule:
        """Of the `defaults` that the space allows for a workload, the spec's first if none is given, the one of the least modelled time."""
        ...

    def lower(self, spec: S, schedule: Schedule, target: Target) -> Source:
        """Source of the variant. Raises UnsupportedError by name and reason."""
        ...

    def tiling(self, spec: S, schedule: Schedule, target: Target) -> Tiling | None:
        """How a schedule divides calls among the CTAs of the usual GPU of the target; None for an operation on a matrix."""
        ...


class Backend(Lowering[AnySpec], Protocol):
    """A way to lower specs of every operation; it refuses those that it has no kernels for."""
