"""JSON schemas of spec files, for completion and checks in editors. `python -m kvgen.spec.schema` prints that of attention, with `matrix`
that of operations on a matrix.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from types import ModuleType
from typing import Any

from kvgen.plaindata import adapter
from kvgen.spec import matrix, model
from kvgen.spec.base import Model
from kvgen.spec.presets import FORMATS

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """The schema of attention as plain data, with the docstrings of classes and fields as descriptions."""
    schema = _described(model.KernelSpec, model)
    _allow_equal(schema["$defs"]["Workload"]["properties"])
    _allow_presets(schema)
    return {"$schema": DIALECT, **schema}


def matrix_schema() -> dict[str, Any]:
    """The same of operations on a matrix."""
    return {"$schema": DIALECT, **_described(matrix.MatrixSpec, matrix)}


def dumps(schema: dict[str, Any]) -> str:
    """A schema as the text of its file in `docs/`: kvgen-spec.schema.json, kvgen-matrix.schema.json."""
    return json.dumps(schema, indent=2) + "\n"


def _described(kind: type[Model], module: ModuleType) -> dict[str, Any]:
    schema = adapter(kind).json_schema()
    docs = _attribute_docs(inspect.getsource(module))
    _describe(schema, kind.__name__, docs, module)
    for name, part in schema["$defs"].items():
        _describe(part, name, docs, module)
    return schema


def _attribute_docs(source: str) -> dict[str, dict[str, str]]:
    """Per class, the docstring of each field; a class inherits those of its base.

    pydantic's `use_attribute_docstrings` leaves fields without a description that a class declares again.
    """
    found: dict[str, dict[str, str]] = {}
    for cls in ast.parse(source).body:
        if not isinstance(cls, ast.ClassDef):
            continue
        docs: dict[str, str] = {}
        for base in cls.bases:
            docs |= found.get(ast.unparse(base), {})
        for field, text in zip(cls.body, cls.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                docs[ast.unparse(field.target)] = inspect.cleandoc(str(text.value.value))
        found[cls.name] = docs
    return found


def _describe(part: dict[str, Any], name: str, described: dict[str, dict[str, str]], module: ModuleType) -> None:
    part["description"] = inspect.cleandoc(getattr(module, name).__doc__)  # not every release of pydantic takes it from a dataclass
    for field, entry in part.get("properties", {}).items():
        entry.pop("title", None)  # the name again, in other letters
        if "const" in entry:
            entry.pop("enum", None)  # pydantic 2.9 writes both for a single choice
        text = described[name].get(field)
        if text is not None:
            entry["description"] = text


def _allow_equal(workload: dict[str, Any]) -> None:
    """`lengths: equal` in place of a mapping."""
    lengths = workload["lengths"]
    workload["lengths"] = {"anyOf": [{"const": "equal"}, {"$ref": "#/$defs/Lengths"}], "description": lengths["description"]}
    workload["lengths"]["default"] = "equal"


def _allow_presets(schema: dict[str, Any]) -> None:
    """With `preset`, the fields that it sets are not required."""
    schema["properties"] = {
        "preset": {"enum": list(FORMATS), "description": "Start from a named format; fields given here override it."},
        **schema["properties"],
    }
    required: dict[str, Any] = {}
    for section, name in (("key", "KeySpec"), ("value", "ValueSpec")):
        required[section] = {"required": schema["$defs"][name].pop("required")}
        schema["required"].remove(section)
    schema["if"] = {"not": {"required": ["preset"]}}
    schema["then"] = {"required": list(required), "properties": required}


if __name__ == "__main__":
    print(dumps(matrix_schema() if sys.argv[1:] == ["matrix"] else json_schema()), end="")
