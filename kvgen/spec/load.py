"""Specs from files, text and mappings, with every mistake at once; and back to YAML.

A spec may come from an untrusted place: a malformed one is refused in bounded time and memory. YAML is read by PyYAML's C parser, counted
before it is composed, and counted again as its aliases are followed; mappings from Python are counted alike.
"""

from __future__ import annotations

import os
import re
import stat
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from kvgen.errors import MAX_ISSUES, SpecError, SpecIssue
from kvgen.spec.issues import LineOf, in_order, path_text, readable_problems, shown, spec_issues
from kvgen.spec.model import EQUAL, AnySpec, KernelSpec, MatrixSpec
from kvgen.spec.presets import FORMATS, start_from
from kvgen.spec.rules import UNREADABLE, Place

MAX_TEXT = 1 << 16
"""Bytes of a file or a YAML text, and characters of all texts in a spec, a text that aliases repeat counted every time."""
MAX_VALUES = 8192
"""Field names, values, lists and mappings together; aliases count as often as they are used. 256 full workloads are 4864."""
MAX_DEPTH = 32
"""Mappings and lists inside each other."""
MAX_NUMBER = 64
"""Characters of a number in YAML, digits of an integer in Python."""


def load_spec(source: str | Path | Mapping[str, Any] | KernelSpec) -> KernelSpec:
    """The spec of attention in a YAML file, a YAML text or a mapping.

    A string is YAML if it contains a newline or a `:` followed by a space, or begins with `{` or `[`; else it is the path of a file.
    Raises SpecError with every mistake up to the hundredth, with lines if the source is YAML, and no other exception for any content.
    A group of a preset that does not divide head_dim becomes the largest that does, with a warning; one that is given is a mistake.
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
        return _spec_of(_Reader.of_mapping(source), None)
    if isinstance(source, str) and ("\n" in source or ": " in source or source.lstrip().startswith(("{", "["))):
        return _spec_of(_Reader.of_text(source), None)
    if isinstance(source, str) and not source.strip():
        raise SpecError([SpecIssue("", "a spec is a path, YAML text or a mapping, and this text is empty")])
    if not isinstance(source, (str, Path)):
        raise SpecError([SpecIssue("", f"a spec is a path, YAML text or a mapping, not {type(source).__name__}")])
    return _spec_of(_Reader.of_text(_read(Path(source))), str(source))


def dump_spec(spec: AnySpec) -> str:
    """YAML with every field; `load_any_spec` gives the same spec back."""
    data = spec.to_json()
    data["workloads"] = list(data["workloads"])
    for work in data["workloads"]:
        if work.get("lengths") == EQUAL.to_json():
            work["lengths"] = "equal"
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120)


def _read(path: Path) -> str:
    def without_waiting(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)  # a pipe without a writer then reads as empty

    try:
        with open(path, "rb", opener=without_waiting) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
                raise SpecError([SpecIssue("", "not a file, but a socket or a device")], str(path))
            os.set_blocking(file.fileno(), True)  # a pipe that has a writer is read to its end
            content = file.read(MAX_TEXT + 1) or b""
        if len(content) > MAX_TEXT:
            raise SpecError([SpecIssue("", f"too large: a spec has at most {MAX_TEXT} bytes of text")], str(path))
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"the file is not UTF-8 text (byte {error.start})"
    except FileNotFoundError as error:
        name = str(path)
        preset = f"{name!r} is a preset, not a file: write {{'preset': {name!r}, 'attention': {{...}}}}"
        reason = preset if name in FORMATS else f"cannot read the file: {error.strerror}"
    except (OSError, ValueError) as error:
        reason = f"cannot read the file: {getattr(error, 'strerror', None) or error}"
    raise SpecError([SpecIssue("", reason)], str(path))


def _spec_of(document: _Document, name: str | None) -> AnySpec:
    """The spec in a document, of the `operation` that it names, else of attention. Raises SpecError; `name` is that of its file."""
    data, issues, notes = document.data, document.issues, list[str]()
    line_of: LineOf = document.line_of
    if data is None:
        raise SpecError(issues or [SpecIssue("", "empty: nothing is specified")], name)
    if data is UNREADABLE:
        raise SpecError(issues, name)
    if not isinstance(data, dict):
        raise SpecError([*issues, SpecIssue("", "a spec is a mapping of sections (attention, key, value, ...)", line_of(()))], name)
    model = MatrixSpec if "operation" in data else KernelSpec
    if model is KernelSpec and "preset" in data:
        line_of = _or_preset_line(line_of, data)
        data, problem, notes = start_from(data)
        if problem:
            issues.append(replace(problem, line=line_of((problem.path,))))
    try:
        spec: AnySpec = model.__pydantic_validator__.validate_python(data)
    except ValidationError as error:
        issues += spec_issues(error, model, line_of)
        issues += [SpecIssue(path_text(place), reason, line_of(place)) for place, reason in readable_problems(model, data, error)]
    if issues:
        raise SpecError(in_order(issues), name)
    for note in notes:
        warnings.warn(note, stacklevel=4)
    return spec


def _or_preset_line(line_of: LineOf, written: dict[str, Any]) -> LineOf:
    """Sections that a preset brought have its line."""
    return lambda place: line_of(place if place and place[0] in written else ("preset",))


@dataclass
class _Document:
    """A spec as plain Python, UNREADABLE where `issues` give the reason; None for an empty text."""

    data: Any = None
    issues: list[SpecIssue] = field(default_factory=list)
    lines: dict[Place, int] = field(default_factory=dict)

    def line_of(self, place: Sequence[str | int]) -> int | None:
        """Line of a field, or of the mapping that lacks it."""
        return next((self.lines[p] for p in (tuple(place[:end]) for end in range(len(place), -1, -1)) if p in self.lines), None)


class _TooLarge(Exception):
    """The spec exceeds a limit; reading stops."""

    def __init__(self, reason: str, place: Place, line: int | None) -> None:
        self.issue = SpecIssue(path_text(place), reason, line)


class _Reader:
    """Reads YAML's nodes or Python's values into a document."""

    def __init__(self) -> None:
        self.document = _Document()
        self.values = self.characters = 0

    @classmethod
    def of_mapping(cls, data: Mapping[Any, Any]) -> _Document:
        """Values of other types than those of plain data are kept; the models refuse them."""
        reader = cls()
        try:
            reader.document.data = reader.read(data, ())
        except _TooLarge as error:
            reader.document.data = UNREADABLE
            reader.document.issues.append(error.issue)
        return reader.document

    @classmethod
    def of_text(cls, text: str) -> _Document:
        """One YAML document. Never raises for mistakes in the text; they are issues."""
        reader = cls()
        document = reader.document
        try:
            if len(text) > MAX_TEXT or len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT:
                raise _TooLarge(f"too large: a spec has at most {MAX_TEXT} bytes of text", (), None)
            cls().count_events(yaml.parse(text, Loader=_Loader))
            node = yaml.compose(text, Loader=_Loader)
            document.data = None if node is None else reader.read(node, ())
            return document
        except _TooLarge as error:
            issue = error.issue
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
            problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
            message = f"not valid YAML: {problem} {getattr(error, 'context', None) or ''}"
            issue = SpecIssue("", " ".join(message.split()), mark.line + 1 if mark else None)
        except (ValueError, OverflowError) as error:  # surrogates, and what escapes make of them
            issue = SpecIssue("", f"not valid YAML: {error}")
        document.data = UNREADABLE
        document.issues.append(issue)
        return document

    def count_events(self, events: Iterable[yaml.Event]) -> None:
        """Count what the composer would nest, since it recurses without a limit."""
        depth = 0
        for event in events:
            if isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            elif isinstance(event, yaml.NodeEvent):
                self.count(depth, "", (), event.start_mark.line + 1)  # type: ignore[union-attr]
                depth += isinstance(event, yaml.CollectionStartEvent)

    def count(self, depth: int, text: Any, place: Place, line: int | None) -> None:
        """Count one name or value. Raises _TooLarge beyond a limit."""
        self.values += 1
        self.characters += len(text) if isinstance(text, str) else 0
        if depth > MAX_DEPTH:
            raise _TooLarge(f"nested too deeply: a spec has at most {MAX_DEPTH} mappings and lists inside each other", place, line)
        if self.values > MAX_VALUES:
            raise _TooLarge(f"too large: a spec has at most {MAX_VALUES} names and values", place, line)
        if self.characters > MAX_TEXT:
            raise _TooLarge(f"too large: the texts of a spec have at most {MAX_TEXT} characters", place, line)

    def read(self, value: Any, place: Place) -> Any:
        """Dicts for mappings, lists for lists and tuples, UNREADABLE where an issue gives the reason."""
        line, tag, content = _parts(value)
        if line is not None:
            self.document.lines.setdefault(place, line)
        self.count(len(place), content, place, line)
        if tag is not None and tag not in _TAGS[type(value)]:
            return self.refuse(place, line, f"the YAML tag {tag} has no place in a spec")
        if isinstance(value, (Mapping, yaml.MappingNode)):
            return self.mapping(content if tag else content.items(), place)
        if isinstance(value, (list, tuple, yaml.SequenceNode)):
            return [self.read(item, (*place, index)) for index, item in enumerate(content)]
        try:
            if isinstance(value, yaml.ScalarNode):
                content = _scalar(value.tag, content)
            _require_readable(content)
        except ValueError as error:
            return self.refuse(place, line, str(error))
        return content

    def mapping(self, items: Iterable[tuple[Any, Any]], place: Place) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key, value in items:
            line, tag, name = _parts(key)
            inner = (*place, name) if isinstance(name, str) else place
            self.count(len(place), name, place, line)
            if not isinstance(name, str) or tag not in (None, _STR) or not _is_text(name):
                said = "a list or mapping" if isinstance(key, yaml.CollectionNode) else shown(name)
                self.refuse(place, line, f"field names are plain text, not {said}")
            elif name in data:
                self.refuse(inner, line, f"given twice, first on line {self.document.lines[inner]}")
            else:
                if line is not None:
                    self.document.lines[inner] = line
                data[name] = self.read(value, inner)
        return data

    def refuse(self, place: Place, line: int | None, message: str) -> Any:
        """Record an issue and return UNREADABLE. Issues beyond MAX_ISSUES are dropped."""
        if len(self.document.issues) <= MAX_ISSUES:
            self.document.issues.append(SpecIssue(path_text(place), message, line))
        return UNREADABLE


def _parts(value: Any) -> tuple[int | None, str | None, Any]:
    """Line, tag and content of a node; the content alone of a value from Python."""
    if isinstance(value, yaml.Node):
        return value.start_mark.line + 1, value.tag, value.value
    return None, None, value


_NULL, _BOOL, _INT, _FLOAT, _STR, _MAP, _SEQ = (
    f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "map", "seq")
)
_TAGS = {yaml.ScalarNode: {_NULL, _BOOL, _INT, _FLOAT, _STR}, yaml.MappingNode: {_MAP}, yaml.SequenceNode: {_SEQ}}
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


def _require_readable(value: Any) -> None:
    """Raises ValueError, with the reason, for a text or a number that no field accepts."""
    if isinstance(value, int) and not -(10**MAX_NUMBER) < value < 10**MAX_NUMBER:
        raise ValueError(f"not a readable integer: it has more than {MAX_NUMBER} digits")
    if isinstance(value, str) and not _is_text(value):
        raise ValueError("not text: half of a surrogate pair stands in it")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
