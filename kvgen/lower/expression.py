"""Expressions of search-space constraints: a checked, side-effect-free subset of Python."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

FUNCTIONS: dict[str, Any] = {"min": min, "max": max, "abs": abs}

_ALLOWED = (
    ast.Expression, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare, ast.IfExp, ast.Call, ast.Name, ast.Constant, ast.Tuple, ast.List,
    ast.boolop, ast.unaryop, ast.operator, ast.cmpop, ast.Load,
)  # fmt: skip


class Expression:
    """A compiled expression; call it with the values of the names that it mentions."""

    __slots__ = ("_code", "names", "text")

    def __init__(self, text: str) -> None:
        """Raises SyntaxError if the text is not an expression, or uses attributes, subscripts, lambdas or the like."""
        tree = ast.parse(text, mode="eval")
        for node in ast.walk(tree):
            if not isinstance(node, _ALLOWED):
                raise SyntaxError(f"`{text}` uses {type(node).__name__}, which constraints may not")
        self.text = text
        self.names = frozenset(n.id for n in ast.walk(tree) if isinstance(n, ast.Name)) - FUNCTIONS.keys()
        self._code = compile(tree, "<constraint>", "eval")

    def __call__(self, scope: Mapping[str, Any]) -> Any:
        """The value of the expression. Raises the exceptions of its arithmetic."""
        return eval(self._code, {"__builtins__": FUNCTIONS}, dict(scope))

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"
