"""The back ends, found by name or by target; each is imported only when asked for."""

from __future__ import annotations

import importlib

from kvgen.arch import Target
from kvgen.errors import KvgenError, ToolchainMissing, UnsupportedError
from kvgen.lower.base import Backend
from kvgen.lower.operations import Operations
from kvgen.spec import AnySpec

NAMES = ("cuda", "tilelang", "cpu")


def get_backend(name: str) -> Backend:
    """The back end called `name`.

    Raises KvgenError for an unknown name and ToolchainMissing if a library that the back end needs is not installed.
    """
    if name not in NAMES:
        raise KvgenError(f"there is no back end {name!r}: choose from {', '.join(NAMES)}")
    try:
        package = importlib.import_module(f"kvgen.lower.{name}")
    except ImportError as error:
        raise ToolchainMissing(f"the {name} back end cannot be loaded: {error}") from error
    return Operations(package.backend(), package.matrix())


def backends_for(target: Target) -> list[Backend]:
    """The back ends that lower for a target and can be loaded here, in order of preference."""
    return [backend for backend, _ in map(_try, NAMES) if backend is not None and target in backend.targets]


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
    for name in NAMES:
        backend, missing = _try(name)
        if backend is None:
            reasons.append(str(missing))
        elif target in backend.targets:  # others say nothing of the spec
            reason = refusal(backend, spec, target)
            if reason is None:
                return backend, reasons
            reasons.append(f"{name}: {reason}")
    return None, reasons


def missing_backends() -> dict[str, str]:
    """Back ends that cannot be loaded here, each with the reason."""
    return {name: reason for name in NAMES if (reason := _try(name)[1]) is not None}


def _try(name: str) -> tuple[Backend | None, str | None]:
    try:
        return get_backend(name), None
    except ToolchainMissing as error:
        return None, str(error)
