"""YAML to plain data, with the line of every field; nothing in a file can make it loop, expand or run code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from kvgen.errors import SpecIssue
from kvgen.spec.issues import path_text

MAX_CHARS = 1 << 20
MAX_NODES = 10_000
MAX_DEPTH = 32

_TAG = "tag:yaml.org,2002:"
_PLAIN = {_TAG + kind for kind in ("null", "bool", "int", "float", "str", "timestamp", "map", "seq")}

Place = tuple[str | int, ...]


@dataclass
class Document:
    """Parsed YAML: `data` as plain Python, `issues` found on the way."""

    data: Any = None
    issues: list[SpecIssue] = field(default_factory=list)
    _lines: dict[Place, int] = field(default_factory=dict)

    def line_of(self, place: Sequence[str | int]) -> int | None:
        """Line of a field, or of what would hold it."""
        for end in range(len(place), -1, -1):
            line = self._lines.get(tuple(place[:end]))
            if line is not None:
                return line
        return None


def parse(text: str) -> Document:
    """Read one YAML document. Never raises for what the text says: mistakes are in `issues`."""
    document = Document()
    if len(text) > MAX_CHARS:
        document.issues.append(SpecIssue("", f"a spec has at most {MAX_CHARS} characters, this has {len(text)}"))
        return document
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        document.issues.append(_syntax_issue(error))
        return document
    except RecursionError:
        document.issues.append(SpecIssue("", "not valid YAML: nested too deeply"))
        return document
    except ValueError as error:  # PyYAML lets some bad escapes through to chr()
        document.issues.append(SpecIssue("", f"not valid YAML: {error}"))
        return document
    if node is not None:
        document.data = _Reader(document).read(node, ())
    return document


def _syntax_issue(error: yaml.YAMLError) -> SpecIssue:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    context = getattr(error, "context", None)
    message = f"not valid YAML: {problem}" + (f" {context}" if context else "")
    return SpecIssue("", " ".join(message.split()), mark.line + 1 if mark else None)


class _Reader:
    """Walks nodes, keeps lines, and stops where a document grows beyond any spec."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.scalars = yaml.SafeLoader("")
        self.nodes = 0

    def read(self, node: yaml.Node, place: Place) -> Any:
        self.document._lines.setdefault(place, node.start_mark.line + 1)
        self.nodes += 1
        if self.nodes > MAX_NODES or len(place) > MAX_DEPTH:
            if self.nodes <= MAX_NODES + 1:
                self.note(node, place, "too large or nested too deeply for a spec")
            self.nodes = max(self.nodes, MAX_NODES + 1)  # stop expanding everywhere
            return None
        if node.tag not in _PLAIN:
            self.note(node, place, f"the YAML tag {node.tag} has no place in a spec")
            return None
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*place, index)) for index, item in enumerate(node.value)]
        return self.scalar(node, place)

    def mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for name, value in node.value:
            line = name.start_mark.line + 1
            if not isinstance(name, yaml.ScalarNode) or name.tag != _TAG + "str":
                shown = name.value if isinstance(name, yaml.ScalarNode) else "a list or mapping"
                self.note(name, place, f"field names are plain text, not {shown}")
                continue
            inner = (*place, name.value)
            if name.value in data:
                self.note(name, inner, f"given twice, first on line {self.document._lines[inner]}")
                continue
            self.document._lines[inner] = line
            data[name.value] = self.read(value, inner)
        return data

    def scalar(self, node: yaml.Node, place: Place) -> Any:
        if node.tag == _TAG + "timestamp":  # a date is text here
            return node.value
        try:
            return self.scalars.construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError, KeyError):
            self.note(node, place, f"not a readable {node.tag[len(_TAG) :]}: {node.value[:20]!r}")
            return None

    def note(self, node: yaml.Node, place: Place, message: str) -> None:
        self.document.issues.append(SpecIssue(path_text(place), message, node.start_mark.line + 1))
