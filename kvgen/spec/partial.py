"""A spec with mistakes, as far as its fields can be read: rules between fields are judged on what is right."""

from __future__ import annotations

from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from kvgen.spec.limits import UNREADABLE
from kvgen.spec.model import RULE, KernelSpec
from kvgen.spec.rules import Place

M = TypeVar("M", bound=BaseModel)


def partial_spec(data: dict[str, Any], error: ValidationError) -> KernelSpec:
    """The spec in `data`, which pydantic refused with `error`. Reading a field that is unknown raises AttributeError.

    Unknown is a field with a mistake, and one that is not given where its section has a name that no field has: that may be this
    field, misspelt.
    """
    not_of_values = (RULE, "too_short")  # pydantic calls a list short where its items are wrong
    wrong = {e["loc"] for e in error.errors(include_url=False) if e["type"] not in not_of_values}
    return _section(KernelSpec, data, wrong, ())


def _section(model: type[M], data: dict[str, Any], wrong: set[Place], place: Place) -> M:
    fields = model.model_fields
    given = {name: _value(fields[name].annotation, data[name], wrong, (*place, name)) for name in data if name in fields}
    section = model.model_construct(**given)
    for name, field in fields.items():
        maybe_misspelt = name not in given and len(given) < len(data)
        if maybe_misspelt or given.get(name, UNREADABLE if field.is_required() else None) is UNREADABLE:
            section.__dict__.pop(name, None)
    return section


def _value(annotation: Any, value: Any, wrong: set[Place], place: Place) -> Any:
    """The value of a field, with sections and lists as far as they can be read; UNREADABLE where it is wrong."""
    if place in wrong:
        return UNREADABLE
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _section(annotation, value, wrong, place) if isinstance(value, dict) else value
    if get_origin(annotation) is tuple:
        if not isinstance(value, (list, tuple)):  # a set or an iterator has no order to name its items by, or is used up
            return UNREADABLE
        return tuple(_value(get_args(annotation)[0], item, wrong, (*place, index)) for index, item in enumerate(value))
    return value
