"""Specs from files, text and mappings, with every mistake at once; and back to YAML."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvgen.errors import SpecError, SpecIssue
from kvgen.spec.limits import MAX_TEXT
from kvgen.spec.matrix import MatrixSpec
from kvgen.spec.model import EQUAL, KernelSpec
from kvgen.spec.operations import AnySpec
from kvgen.validated import recall, record


def load_spec(source: str | Path | Mapping[str, Any] | KernelSpec) -> KernelSpec:
    """The spec of attention in a YAML file, a YAML text or a mapping.

    A string is YAML if it contains a newline or a `:` followed by a space, or begins with `{` or `[`; else it is the path of a file.
    Raises SpecError with every mistake up to the hundredth, with lines if the source is YAML, and no other exception for any content.
    A group of a preset that does not divide head_dim becomes the largest that does, with a warning; one that is given is a mistake.
    A source that exceeds `kvgen.spec.limits` is refused. What was accepted once is recorded in the cache folder (`kvgen.validated`).
    """
    spec = load_any_spec(source)
    if isinstance(spec, MatrixSpec):
        hint = "kvgen.get_matrix_kernel takes it"
        raise SpecError([SpecIssue("operation", f"{spec.operation} is an operation on a matrix, and attention is asked for", None, hint)])
    return spec


def load_any_spec(source: str | Path | Mapping[str, Any] | AnySpec) -> AnySpec:
    """The same for a spec of any operation: an `operation` makes it a MatrixSpec."""
    if isinstance(source, (KernelSpec, MatrixSpec)):
        return source
    if isinstance(source, Mapping):
        return _load_mapping(source)
    if isinstance(source, str) and ("\n" in source or ": " in source or source.lstrip().startswith(("{", "["))):
        return _load_text(source, None)
    if isinstance(source, str) and not source.strip():
        raise SpecError([SpecIssue("", "a spec is a path, YAML text or a mapping, and this text is empty")])
    if not isinstance(source, (str, Path)):
        raise SpecError([SpecIssue("", f"a spec is a path, YAML text or a mapping, not {type(source).__name__}")])
    return _load_text(_read(Path(source)), str(source))


def dump_spec(spec: AnySpec) -> str:
    """YAML with every field; `load_any_spec` gives the same spec back."""
    import yaml

    data = spec.to_json()
    for work in data["workloads"]:
        if work.get("lengths") == EQUAL.to_json():
            work["lengths"] = "equal"
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120)


def _read(path: Path) -> str:
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
                raise SpecError([SpecIssue("", "not a file, but a socket or a device")], str(path))
            os.set_blocking(file.fileno(), True)  # a pipe that has a writer is read to its end
            content = file.read(MAX_TEXT + 1) or b""
        if len(content) > MAX_TEXT:
            raise SpecError([SpecIssue("", f"too large: a spec has at most {MAX_TEXT} bytes of text")], str(path))
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError([SpecIssue("", f"the file is not UTF-8 text (byte {error.start})")], str(path)) from None
    except (OSError, ValueError) as error:
        raise SpecError([SpecIssue("", _unreadable(path, error))], str(path)) from None


def _unreadable(path: Path, error: Exception) -> str:
    """Why there is no spec at a path, which may be the name of a preset."""
    from kvgen.spec.presets import FORMATS

    name = str(path)
    if isinstance(error, FileNotFoundError) and name in FORMATS:
        return f"{name!r} is a preset, not a file: write {{'preset': {name!r}, 'attention': {{...}}}}"
    return f"cannot read the file: {error.strerror if isinstance(error, OSError) and error.strerror else error}"


def _without_waiting(path: str, flags: int) -> int:
    """Open a file that may be a pipe without a writer: it then reads as empty."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _load_text(text: str, name: str | None) -> AnySpec:
    source = f"text\n{text}" if len(text) <= MAX_TEXT else None
    spec: AnySpec | None = recall(KernelSpec, source) or recall(MatrixSpec, source)
    if spec is None:
        from kvgen.spec.document import parse
        from kvgen.spec.validation import spec_of

        document = parse(text)
        if document.data is None:
            raise SpecError(document.issues or [SpecIssue("", "empty: nothing is specified")], name)
        spec, notes = spec_of(document.data, document.issues, document.line_of, name)
        _keep(spec, notes, source)
    return spec


def _load_mapping(mapping: Mapping[Any, Any]) -> AnySpec:
    from kvgen.spec.plain import plain, plain_text

    data, issues = plain(mapping)
    text = None if issues else plain_text(data)
    source = f"mapping\n{text}" if text is not None else None
    spec: AnySpec | None = recall(KernelSpec, source) or recall(MatrixSpec, source)
    if spec is None:
        from kvgen.spec.validation import spec_of

        spec, notes = spec_of(data, issues)
        _keep(spec, notes, source)
    return spec


def _keep(spec: AnySpec, notes: tuple[str, ...], source: str | None) -> None:
    """Record a spec, or warn where it is not what its preset says: then the next process has to warn, too."""
    if not notes:
        record(spec, source, spec.to_json())
    for note in notes:
        warnings.warn(note, stacklevel=5)
