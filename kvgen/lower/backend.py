"""Back ends: the protocol that they follow, the source that lowering returns, and the choice of one by name, target or spec."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from kvgen._resources import templates
from kvgen.arch import Target
from kvgen.digest import digest, files_digest
from kvgen.errors import KvgenError, UnsupportedError
from kvgen.lower.schedule import Schedule
from kvgen.lower.template import headers_digest, reached_headers, render, tokens_digest
from kvgen.spec import AnySpec, AnyWorkload, KernelSpec
from kvgen.spec.dispatch import Tiling

if TYPE_CHECKING:  # fetching a kernel searches nothing
    from kvgen.lower.space import SearchSpace

Language = Literal["c++", "cuda"]
NAMES = ("cuda", "tilelang", "cpu")
"""Packages of `kvgen.lower`, in order of preference; each is imported only when asked for."""
FUNCTIONS = ("advance", "attend", "crop", "decode", "pack", "plan", "plan_size", "split_tokens", "unpack", "workspace_bytes")
"""What a compiled module exports and the runtime calls; `docs/abi.md` lists their arguments."""
CPU_FLAGS = ("-fopenmp", "-Wno-psabi", "-fvisibility=hidden", "-fvisibility-inlines-hidden")
"""Compiler flags of C++ beyond the toolchain's own. Only the exported functions are visible, so no vector crosses a library border, and
modules share no inline variable: the linker would merge those of all modules of a process.
"""

S = TypeVar("S", contravariant=True)


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

    @classmethod
    def of_template(
        cls,
        template: str,
        target: Target,
        functions: tuple[str, ...],
        flags: tuple[str, ...] = (),
        folders: Sequence[str] = (),
        /,
        **context: Any,
    ) -> Source:
        """A template, `cuda/x.cu.jinja` or `cpu/x.cpp.jinja`, rendered over headers, by default those of its folder and the common ones."""
        text = render(template, **context)
        include = tuple(templates() / part / "include" for part in folders or (template.partition("/")[0], "common"))
        language: Language = "cuda" if template.endswith(".cu.jinja") else "c++"
        return cls(text, language, target, include, flags, reached_headers(text, include), functions)

    @property
    def id(self) -> str:
        """Digest of text, headers, language, target and flags, byte for byte: the key of compiled modules."""
        return digest([self.text, files_digest(self.headers), self.language, self.target, list(self.flags)])

    @property
    def fingerprint(self) -> str:
        """Digests of what a compiler sees: of the text's tokens, language, target and flags, and of the headers' tokens."""
        text = digest([tokens_digest(self.text), self.language, self.target, list(self.flags)])
        return f"{text}-{headers_digest(self.headers)}"


class Lowering(Protocol[S]):
    """A way to lower specs of one kind. Answers depend on the arguments and the installation alone; none compiles or runs a kernel.

    Only `lower` may take long: TileLang lowers in a process of its own, and keeps what it made in the user's cache.
    """

    name: str
    targets: tuple[Target, ...]

    def missing(self) -> str | None:
        """What has to be installed before this back end can lower anything, in one clause; None if all is here."""
        return None

    def unsupported(self, spec: S, target: Target) -> str | None:
        """Why this back end cannot lower the spec for the target, whatever is installed, in one clause; None if it can."""
        ...

    def space(self, spec: S, target: Target) -> SearchSpace:
        """Parameters, their values for this spec and target, and constraints with reasons. Raises UnsupportedError."""
        ...

    def defaults(self, spec: S, target: Target) -> tuple[Schedule, ...]:
        """At most five schedules of one layout that together are near the best for every call, with nothing measured. The first, the
        plain one, suits every workload of the spec. Raises UnsupportedError where none does.
        """
        ...

    def default(self, spec: S, target: Target, work: AnyWorkload | None = None) -> Schedule:
        """Of the `defaults` that the space allows for a workload, the spec's first if none is given, the one of the least modelled time."""
        del work
        return self.defaults(spec, target)[0]

    def lower(self, spec: S, schedule: Schedule, target: Target) -> Source:
        """Source of the variant. Raises UnsupportedError by name and reason."""
        ...

    def tiling(self, spec: S, schedule: Schedule, target: Target) -> Tiling | None:
        """How a schedule divides calls among the CTAs of the usual GPU of the target; None where no model chooses a launch."""
        del spec, schedule, target
        return None

    def require(self, spec: S, target: Target) -> None:
        """Raises UnsupportedError where the spec is unsupported."""
        if reason := self.unsupported(spec, target):
            raise UnsupportedError(self.name, reason)

    def require_schedule(self, spec: S, schedule: Schedule, target: Target) -> None:
        """Raises UnsupportedError where the spec is unsupported, or the schedule violates a constraint."""
        if problems := self.space(spec, target).check(schedule):
            raise UnsupportedError(self.name, f"schedule {schedule}: {'; '.join(problems)}")


class Backend:
    """The lowerings of one back end: each question goes to that of the spec's operation, see `Lowering`."""

    def __init__(self, name: str, lowerings: Mapping[type, Lowering[Any]]) -> None:
        """`lowerings` by the kinds of specs that the back end has kernels for, attention among them."""
        self.name, self.lowerings = name, lowerings
        self.targets = lowerings[KernelSpec].targets

    def missing(self) -> str | None:
        return self.lowerings[KernelSpec].missing()

    def unsupported(self, spec: AnySpec, target: Target) -> str | None:
        return self._absent(spec) or self._of(spec).unsupported(spec, target)

    def space(self, spec: AnySpec, target: Target) -> SearchSpace:
        return self._of(spec).space(spec, target)

    def default(self, spec: AnySpec, target: Target, work: AnyWorkload | None = None) -> Schedule:
        return self._of(spec).default(spec, target, work)

    def defaults(self, spec: AnySpec, target: Target) -> tuple[Schedule, ...]:
        return self._of(spec).defaults(spec, target)

    def lower(self, spec: AnySpec, schedule: Schedule, target: Target) -> Source:
        return self._of(spec).lower(spec, schedule, target)

    def tiling(self, spec: AnySpec, schedule: Schedule, target: Target) -> Tiling | None:
        return self._of(spec).tiling(spec, schedule, target)

    def _absent(self, spec: AnySpec) -> str | None:
        if isinstance(spec, KernelSpec) or type(spec) in self.lowerings:
            return None
        return f"it has no kernels for the operation {spec.operation}"

    def _of(self, spec: AnySpec) -> Lowering[Any]:
        if reason := self._absent(spec):
            raise UnsupportedError(self.name, reason)
        return self.lowerings[type(spec)]


class Sources:
    """Sources of the schedules of one spec; `backends` by name. What compiles a schedule, names its measurements and registers it reads the
    same text: each schedule is lowered once, which may take seconds.
    """

    def __init__(self, spec: AnySpec, target: Target, backends: Mapping[str, Backend]) -> None:
        self.spec, self.target, self.backends = spec, target, backends
        self._sources: dict[str, Source] = {}

    def of(self, schedule: Schedule) -> Source:
        """The source of a schedule. Raises as `Backend.lower` does, and tries again at the next call then."""
        source = self._sources.get(schedule.id)
        if source is None:
            source = self._sources[schedule.id] = self.backends[schedule.backend].lower(self.spec, schedule, self.target)
        return source


def get_backend(name: str) -> Backend:
    """The back end called `name`. Raises KvgenError for an unknown name."""
    if name not in NAMES:
        raise KvgenError(f"there is no back end {name!r}: choose from {', '.join(NAMES)}")
    package = importlib.import_module(f"kvgen.lower.{name}")
    return Backend(name, {KernelSpec: package.backend(), **package.operations})


def backends_for(target: Target) -> list[Backend]:
    """The back ends that lower for a target, in order of preference. Those for GPUs are not imported for a CPU."""
    names = [name for name in NAMES if (name == "cpu") == (target == "cpu")]
    return [backend for backend in map(get_backend, names) if target in backend.targets]


def refusal(backend: Backend, spec: AnySpec, target: Target) -> str | None:
    """Why a back end gives no kernel for a spec here; None if it does.

    The reason is its targets, a feature, what is not installed, or that no schedule suits every workload.
    """
    if target not in backend.targets:
        return f"it does not target {target}"
    reason = backend.unsupported(spec, target) or backend.missing()
    if reason is None:
        try:
            backend.defaults(spec, target)
        except UnsupportedError as error:
            return error.reason
    return reason


def first_for(spec: AnySpec, target: Target) -> tuple[Backend | None, list[str]]:
    """The first back end that gives a kernel for a spec here, None where none does, and why those for the target before it give none."""
    reasons: list[str] = []
    for backend in backends_for(target):
        reason = refusal(backend, spec, target)
        if reason is None:
            return backend, reasons
        reasons.append(f"{backend.name}: {reason}")
    return None, reasons
