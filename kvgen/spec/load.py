"""Specs from files, text and mappings, with lines and suggestions for what is wrong; and back to YAML.

A spec may come from an untrusted place: a malformed one is refused in bounded time and memory. YAML is read by PyYAML's C parser within
limits of size, depth and use of aliases.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from kvgen.errors import SpecError, SpecIssue
from kvgen.spec.issues import closest, path_text, shown, spec_issues
from kvgen.spec.model import EQUAL, OPERATIONS, AnySpec, KernelSpec, LinearSpec, MatrixSpec, Model
from kvgen.spec.presets import FORMATS, start_from
from kvgen.spec.rules import Place

S = TypeVar("S", KernelSpec, MatrixSpec, LinearSpec)
KINDS: dict[type[Model], tuple[str, str]] = {
    KernelSpec: ("attention", "get_kernel"),
    MatrixSpec: ("an operation on a matrix", "get_matrix_kernel"),
    LinearSpec: ("a linear layer", "get_linear_kernel"),
}
"""What specs of a kind are of, and the call that takes them."""
MAX_TEXT = 1 << 16
"""Bytes of a file or a YAML text."""
MAX_VALUES = 8192
"""Field names, values, lists and mappings together; aliases count as often as they are used. 256 full workloads are 4864."""
MAX_DEPTH = 32
"""Mappings and lists inside each other."""
MAX_NUMBER = 64
"""Characters of a number in YAML."""


def load_spec(source: str | Path | Mapping[str, Any] | KernelSpec) -> KernelSpec:
    """The spec of attention in a YAML file, a YAML text or a mapping.

    A string is YAML if it contains a newline or a `:` followed by a space, or begins with `{` or `[`; else it is the path of a file.
    Raises SpecError, with lines if the source is YAML, and no other exception for any content. It lists the mistakes in the YAML; where
    there are none, those in fields, up to the hundredth; where there are none, those between sections. A group of a preset that does not
    divide head_dim becomes the largest that does, with a warning; one that is given is a mistake.
    """
    return load_as(KernelSpec, source)


def load_as(kind: type[S], source: str | Path | Mapping[str, Any] | AnySpec) -> S:
    """The spec of one kind. Raises SpecError, also for a spec of another one."""
    spec = load_any_spec(source)
    if isinstance(spec, kind):
        return spec
    (what, call), (wanted, _) = KINDS[type(spec)], KINDS[kind]
    raise SpecError([SpecIssue("operation", f"this spec is of {what}, and {wanted} is asked for", None, f"kvgen.{call} takes it")])


def load_any_spec(source: str | Path | Mapping[str, Any] | AnySpec) -> AnySpec:
    """The same for a spec of any operation: an `operation` makes it one of another kind than attention."""
    if isinstance(source, AnySpec):
        return source
    if isinstance(source, Mapping):
        return _spec_of(dict(source), {}, None)
    if isinstance(source, str) and ("\n" in source or ": " in source or source.lstrip().startswith(("{", "["))):
        return _spec_of(*_read_yaml(source, None), None)
    if not isinstance(source, (str, Path)) or not str(source).strip():
        told = "this text is empty" if isinstance(source, str) else f"this is of type {type(source).__name__}"
        raise SpecError([SpecIssue("", f"a spec is a path, YAML text or a mapping, and {told}")])
    return _spec_of(*_read_yaml(_read(Path(source)), str(source)), str(source))


def read_mapping(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file, which need not be a whole spec. Raises SpecError."""
    data, _ = _read_yaml(_read(file), str(file))
    if not isinstance(data, dict):
        raise SpecError([SpecIssue("", "a format is a mapping of sections (key, value, cache, ...)")], str(file))
    return data


def dump_spec(spec: AnySpec) -> str:
    """YAML with every field; `load_any_spec` gives the same spec back."""
    data = spec.to_json()
    data["workloads"] = list(data["workloads"])
    for work in data["workloads"]:
        if work.get("lengths") == EQUAL.to_json():
            work["lengths"] = "equal"
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_TEXT + 1).decode("utf-8-sig")
    except FileNotFoundError as error:
        name = str(path)
        preset = f"{name!r} is a preset, not a file: write {{'preset': {name!r}, 'attention': {{...}}}}"
        reason = preset if name in FORMATS else f"cannot read the file: {error.strerror}"
    except (OSError, ValueError) as error:
        reason = f"cannot read the file: {getattr(error, 'strerror', None) or error}"
    raise SpecError([SpecIssue("", reason)], str(path))


def _spec_of(data: Any, lines: Mapping[Place, int], name: str | None) -> AnySpec:
    """The spec of the `operation` that plain data names, else of attention. Raises SpecError; `name` is that of the file."""

    def line_of(place: Place) -> int | None:
        """Line of a field, or of the mapping that lacks it; of the preset, where that brought the section."""
        place = place if not place or place[0] in data or "preset" not in data else ("preset",)
        return next((lines[place[:end]] for end in range(len(place), -1, -1) if place[:end] in lines), None)

    if not isinstance(data, dict):
        reason = "empty: nothing is specified" if data is None else "a spec is a mapping of sections (attention, key, value, ...)"
        raise SpecError([SpecIssue("", reason, lines.get(()))], name)
    operation, whole, notes = data.get("operation"), data, list[str]()
    model: type[KernelSpec] | type[MatrixSpec] | type[LinearSpec] = KernelSpec
    if "operation" in data:
        if operation not in list(OPERATIONS):  # what no dictionary can look up, too
            close = closest(shown(operation).strip("'"), OPERATIONS)
            reason, hint = f"must be one of {', '.join(OPERATIONS)}, not {shown(operation)}", close and f"did you mean {close}?"
            raise SpecError([SpecIssue("operation", reason, line_of(("operation",)), hint)], name)
        model = OPERATIONS[operation]
    if model is KernelSpec and "preset" in data:
        whole, problem, notes = start_from(data)
        if problem:
            raise SpecError([replace(problem, line=line_of((problem.path,)))], name)
    try:
        spec: AnySpec = model.__pydantic_validator__.validate_python(whole)
    except ValidationError as error:
        raise SpecError(spec_issues(error, model, line_of), name) from None
    for note in notes:
        warnings.warn(note, stacklevel=4)
    return spec


# --- YAML --------------------------------------------------------------------------------------------------------------

_NULL, _BOOL, _INT, _FLOAT, _STR, _MAP, _SEQ = (
    f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "map", "seq")
)
_TRUTH = yaml.constructor.SafeConstructor.bool_values
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*|0x[0-9a-fA-F]+)\Z")
_DECIMAL = re.compile(r"([-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads numbers as YAML 1.2 does; those that YAML 1.1 reads differently (1:30 for 90, 0100 for 64) are text."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # PyYAML's own form


_Loader.add_implicit_resolver(_NULL, re.compile(r"(~|null|Null|NULL|)\Z"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(_BOOL, re.compile(rf"(?i:{'|'.join(_TRUTH)})\Z"), list("yYnNtTfFoO"))
_Loader.add_implicit_resolver(_INT, _INTEGER, list("-+0123456789"))
_Loader.add_implicit_resolver(_FLOAT, _DECIMAL, list("-+.0123456789"))


def _read_yaml(text: str, name: str | None) -> tuple[Any, dict[Place, int]]:
    """The plain data of one YAML document, None if it is empty, and the lines of its places. Raises SpecError."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT:
        raise SpecError([SpecIssue("", f"too large: a spec has at most {MAX_TEXT} bytes of text")], name)
    reader = _Reader(name)
    try:
        depth = 0
        for event in yaml.parse(text, Loader=_Loader):  # before the composer, which recurses without a limit
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            reader.require_depth(depth, (), event.start_mark.line + 1)  # type: ignore[union-attr]
        node = yaml.compose(text, Loader=_Loader)
        data = None if node is None else reader.read(node, ())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        message = f"not valid YAML: {problem} {getattr(error, 'context', None) or ''}"
        raise SpecError([SpecIssue("", " ".join(message.split()), mark.line + 1 if mark else None)], name) from None
    except (ValueError, OverflowError) as error:  # surrogates, and what escapes make of them
        raise SpecError([SpecIssue("", f"not valid YAML: {error}")], name) from None
    if reader.issues:
        raise SpecError(reader.issues, name)
    return data, reader.lines


class _Reader:
    """From YAML's nodes to plain data; `issues` are of what has no place in a spec."""

    def __init__(self, name: str | None) -> None:
        self.name, self.values = name, 0
        self.lines: dict[Place, int] = {}
        self.issues: list[SpecIssue] = []

    def read(self, node: yaml.Node, place: Place) -> Any:
        """The value of a node. Raises SpecError beyond a limit."""
        line = node.start_mark.line + 1
        self.lines.setdefault(place, line)
        self.values += 1
        self.require_depth(len(place), place, line)
        if self.values > MAX_VALUES:
            raise SpecError([SpecIssue(path_text(place), f"too large: a spec has at most {MAX_VALUES} names and values", line)], self.name)
        if isinstance(node, yaml.ScalarNode):
            try:
                return _scalar(node.tag, node.value)
            except ValueError as error:
                return self.refuse(place, line, str(error))
        if node.tag != (_SEQ if isinstance(node, yaml.SequenceNode) else _MAP):
            return self.refuse(place, line, f"the YAML tag {node.tag} has no place in a spec")
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*place, index)) for index, item in enumerate(node.value)]
        data: dict[str, Any] = {}
        for key, value in node.value:
            line, inner, problem = key.start_mark.line + 1, (*place, key.value), None
            self.values += 1
            if key.tag != _STR:
                inner, problem = place, f"field names are plain text, not {shown(key.value)}"
            elif key.value in data:
                problem = f"given twice, first on line {self.lines[inner]}"
            if problem is not None:
                self.refuse(inner, line, problem)
            else:
                self.lines[inner] = line
                data[key.value] = self.read(value, inner)
        return data

    def refuse(self, place: Place, line: int, reason: str) -> Any:
        """Record an issue; the value is None."""
        self.issues.append(SpecIssue(path_text(place), reason, line))

    def require_depth(self, depth: int, place: Place, line: int) -> None:
        """Raises SpecError for what is nested too deeply."""
        if depth > MAX_DEPTH:
            reason = f"nested too deeply: a spec has at most {MAX_DEPTH} mappings and lists inside each other"
            raise SpecError([SpecIssue(path_text(place), reason, line)], self.name)


def _scalar(tag: str, text: str) -> Any:
    """The value of a scalar. Raises ValueError, with the reason, where it is none of its tag."""
    if tag in (_INT, _FLOAT) and len(text) > MAX_NUMBER:
        raise ValueError(f"not a readable number: it has more than {MAX_NUMBER} characters")
    if tag in (_STR, _NULL):
        return text if tag == _STR else None
    if tag == _BOOL and text.lower() in _TRUTH:
        return _TRUTH[text.lower()]
    if tag == _INT and _INTEGER.match(text):
        return int(text, 0)
    if tag == _FLOAT and (_DECIMAL.match(text) or text.isdecimal()):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    raise ValueError(f"not a readable {tag.rpartition(':')[2]}: {text[:20]!r}")
