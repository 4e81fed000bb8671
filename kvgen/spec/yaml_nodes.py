"""YAML text to PyYAML's nodes, in bounded time: nothing beyond a spec's limits is read, and no number has several parts."""

from __future__ import annotations

import re
from typing import Any

import yaml

from kvgen.errors import SpecIssue
from kvgen.spec.limits import Count, TooLarge

TAG = "tag:yaml.org,2002:"
OCTAL = re.compile(r"[-+]?0[0-9_]+")
EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
NUMBERS = (TAG + "int", TAG + "float")


def compose(text: str) -> yaml.Node | None:
    """The root of the one document in `text`, None where there is none. Raises YAMLError, TooLarge, ValueError, OverflowError."""
    loader = _Loader(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
        return node
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """SafeLoader that counts values and depth as it composes."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.count = Count()
        self.depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.check(self.count.add(self.depth), self.peek_event().start_mark.line)  # type: ignore[no-untyped-call]
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:  # the scanner is up to 1024 characters ahead of the composer
        self.check(Count().add(self.flow_level), self.line)
        super().fetch_flow_collection_start(TokenClass)

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """The tag of a node without one. Numbers that YAML 1.1 and 1.2 read differently (1:30 for 90, 0100 for 64) are text; 1e3 is a
        number, as in YAML 1.2.
        """
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        if tag in NUMBERS and (":" in value or OCTAL.fullmatch(value)):
            return self.DEFAULT_SCALAR_TAG
        plain = kind is yaml.ScalarNode and implicit[0] and tag == self.DEFAULT_SCALAR_TAG
        return TAG + "float" if plain and EXPONENT.fullmatch(value) else tag

    def check(self, reason: str | None, line: int) -> None:
        if reason is not None:
            raise TooLarge(SpecIssue("", reason, line + 1))
