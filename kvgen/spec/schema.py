"""JSON schemas of spec files, for completion and checks in editors; `kvgen schema` prints them."""

from __future__ import annotations

import ast
import inspect
from typing import Any

from pydantic import TypeAdapter

from kvgen.spec import model
from kvgen.spec.presets import FORMATS

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """The schema of attention as plain data, with the docstrings of classes and fields as descriptions."""
    schema = _described(model.KernelSpec)
    lengths = schema["$defs"]["Workload"]["properties"]["lengths"]
    schema["$defs"]["Workload"]["properties"]["lengths"] = {
        "anyOf": [{"const": "equal"}, {"$ref": "#/$defs/Lengths"}],
        "description": lengths["description"],
        "default": "equal",
    }
    for operand in ("KeySpec", "ValueSpec"):
        schema["$defs"][operand]["properties"]["rotate"]["anyOf"].insert(0, {"const": "hadamard"})
    preset = {"enum": list(FORMATS), "description": "Start from a named format; fields given here override it."}
    schema["properties"] = {"preset": preset, **schema["properties"]}
    required: dict[str, Any] = {}  # without `preset` alone
    for section, name in (("key", "KeySpec"), ("value", "ValueSpec")):
        required[section] = {"required": schema["$defs"][name].pop("required")}
        schema["required"].remove(section)
    schema["if"] = {"not": {"required": ["preset"]}}
    schema["then"] = {"required": list(required), "properties": required}
    return schema


def matrix_schema() -> dict[str, Any]:
    """The same of operations on a matrix."""
    return _described(model.MatrixSpec)


def linear_schema() -> dict[str, Any]:
    """The same of linear layers; a file names its operation."""
    schema = _described(model.LinearSpec)
    schema["required"].insert(0, "operation")
    return schema


def _described(kind: type[model.Model]) -> dict[str, Any]:
    schema = {"$schema": DIALECT, **TypeAdapter(kind).json_schema()}
    docs = _field_docs()
    for name, part in ((kind.__name__, schema), *schema["$defs"].items()):
        part["description"] = inspect.cleandoc(getattr(model, name).__doc__)  # not every release of pydantic takes it from a dataclass
        for field, entry in part.get("properties", {}).items():
            entry.pop("title", None)  # the name again, in other letters
            if "const" in entry:
                entry.pop("enum", None)  # pydantic 2.9 writes both for a single choice
            if field in docs[name]:
                entry["description"] = docs[name][field]
    return schema


def _field_docs() -> dict[str, dict[str, str]]:
    """Per class, the docstring of each field; a class inherits those of its base.

    pydantic's `use_attribute_docstrings` leaves fields without a description that a class declares again.
    """
    found: dict[str, dict[str, str]] = {}
    for cls in ast.parse(inspect.getsource(model)).body:
        if isinstance(cls, ast.ClassDef):
            docs = found[cls.name] = {name: text for base in cls.bases for name, text in found.get(ast.unparse(base), {}).items()}
            for field, text in zip(cls.body, cls.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    docs[ast.unparse(field.target)] = inspect.cleandoc(str(text.value.value))
    return found
