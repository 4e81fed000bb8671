"""YAML to plain data, with the line of every field; nothing in a file can make it loop, expand or run code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from kvgen.errors import MAX_ISSUES, SpecIssue
from kvgen.spec.issues import path_text
from kvgen.spec.limits import MAX_NUMBER, MAX_TEXT, UNREADABLE, Count, Place, TooLarge, refusal
from kvgen.spec.yaml_nodes import NUMBERS, TAG, compose

_SCALARS = {TAG + kind for kind in ("null", "bool", "int", "float", "str", "timestamp")}
_PLAIN = {yaml.MappingNode: {TAG + "map"}, yaml.SequenceNode: {TAG + "seq"}, yaml.ScalarNode: _SCALARS}


@dataclass
class Document:
    """Parsed YAML: `data` as plain Python, UNREADABLE where `issues` give the reason; None for an empty text."""

    data: Any = None
    issues: list[SpecIssue] = field(default_factory=list)
    _lines: dict[Place, int] = field(default_factory=dict)

    def line_of(self, place: Sequence[str | int]) -> int | None:
        """Line of a field, or of the mapping that lacks it."""
        for end in range(len(place), -1, -1):
            line = self._lines.get(tuple(place[:end]))
            if line is not None:
                return line
        return None


def parse(text: str) -> Document:
    """Read one YAML document. Never raises for mistakes in the text; they are in `issues`."""
    document = Document()
    try:
        if len(text) > MAX_TEXT or len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT:
            raise TooLarge(SpecIssue("", f"too large: a spec has at most {MAX_TEXT} bytes of text"))
        node = compose(text)
        if node is not None:
            document.data = _Reader(document).read(node, ())
    except TooLarge as error:
        document.data = UNREADABLE
        document.issues.append(error.issue)
    except yaml.YAMLError as error:
        document.data = UNREADABLE
        document.issues.append(_syntax_issue(error))
    except (ValueError, OverflowError) as error:  # PyYAML lets some bad escapes through to chr()
        document.data = UNREADABLE
        document.issues.append(SpecIssue("", f"not valid YAML: {error}"))
    return document


def _syntax_issue(error: yaml.YAMLError) -> SpecIssue:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    context = getattr(error, "context", None)
    message = f"not valid YAML: {problem}" + (f" {context}" if context else "")
    return SpecIssue("", " ".join(message.split()), mark.line + 1 if mark else None)


class _Reader:
    """Walks nodes, records lines, and counts expanded aliases."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.scalars = yaml.constructor.SafeConstructor()
        self.count = Count()

    def read(self, node: yaml.Node, place: Place) -> Any:
        self.document._lines.setdefault(place, node.start_mark.line + 1)
        self.add(node, place)
        if node.tag not in _PLAIN[type(node)]:
            return self.refuse(node, place, f"the YAML tag {node.tag} has no place in a spec")
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*place, index)) for index, item in enumerate(node.value)]
        return self.scalar(node, place)

    def mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode) or name.tag != TAG + "str" or refusal(name.value):
                shown = repr(name.value) if isinstance(name, yaml.ScalarNode) else "a list or mapping"
                self.refuse(name, place, f"field names are plain text, not {shown}")
                continue
            inner = (*place, name.value)
            self.add(name, inner)
            if name.value in data:
                self.refuse(name, inner, f"given twice, first on line {self.document._lines[inner]}")
                continue
            self.document._lines[inner] = name.start_mark.line + 1
            data[name.value] = self.read(value, inner)
        return data

    def scalar(self, node: yaml.Node, place: Place) -> Any:
        kind = node.tag[len(TAG) :]
        text: str = node.value
        if kind in ("str", "timestamp"):  # a date is text here
            reason = refusal(text)
            return text if reason is None else self.refuse(node, place, reason)
        try:
            if node.tag in NUMBERS and len(text) > MAX_NUMBER:
                return self.refuse(node, place, f"not a readable number: it has more than {MAX_NUMBER} characters")
            if node.tag in NUMBERS and ":" in text:
                raise ValueError("a number has no parts")
            return self.scalars.yaml_constructors[node.tag](self.scalars, node)
        except (yaml.YAMLError, ValueError, ArithmeticError, LookupError):
            return self.refuse(node, place, f"not a readable {kind}: {text[:20]!r}")

    def add(self, node: yaml.Node, place: Place) -> None:
        reason = self.count.add(len(place), node.value if isinstance(node, yaml.ScalarNode) else "")
        if reason is not None:
            raise TooLarge(SpecIssue(path_text(place), reason, node.start_mark.line + 1))

    def refuse(self, node: yaml.Node, place: Place, message: str) -> Any:
        """Record an issue and return UNREADABLE. Issues beyond MAX_ISSUES are dropped."""
        if len(self.document.issues) <= MAX_ISSUES:
            self.document.issues.append(SpecIssue(path_text(place), message, node.start_mark.line + 1))
        return UNREADABLE
