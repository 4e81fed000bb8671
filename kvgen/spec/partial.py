"""A spec with mistakes, as far as its fields can be read: rules between fields are judged on what is right."""

from __future__ import annotations

from dataclasses import MISSING, fields
from inspect import getattr_static
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast, get_args, get_origin

from kvgen.spec.base import Model, hints
from kvgen.spec.issues import RULE
from kvgen.spec.limits import UNREADABLE
from kvgen.spec.model import KernelSpec
from kvgen.spec.rules import Place

if TYPE_CHECKING:
    from pydantic import ValidationError


class _Section:
    """The fields of a model that are known, and the properties and methods that follow from them."""

    def __init__(self, model: type[Model], known: dict[str, Any]) -> None:
        self.__dict__.update(known)
        self._model = model

    def __getattr__(self, name: str) -> Any:
        derived: Any = getattr_static(self._model, name, None)
        if not isinstance(derived, (property, FunctionType)):
            raise AttributeError(name)
        return derived.__get__(self)


def partial_spec(data: dict[str, Any], error: ValidationError) -> KernelSpec:
    """The spec in `data`, which pydantic refused with `error`. Reading a field that is unknown raises AttributeError.

    Unknown is a field with a mistake, and one that is not given where its section has a name that no field has: that may be this
    field, misspelt.
    """
    not_of_values = (RULE, "too_short")  # pydantic calls a list short where its items are wrong
    wrong = {e["loc"] for e in error.errors(include_url=False) if e["type"] not in not_of_values}
    return cast(KernelSpec, _section(KernelSpec, data, wrong, ()))


def _section(model: type[Model], data: dict[str, Any], wrong: set[Place], place: Place) -> _Section:
    given = {name: _value(kind, data[name], wrong, (*place, name)) for name, kind in hints(model).items() if name in data}
    maybe_misspelt = len(given) < len(data)
    defaults = {} if maybe_misspelt else {one.name: one.default for one in fields(model) if one.default is not MISSING}
    return _Section(model, {name: value for name, value in {**defaults, **given}.items() if value is not UNREADABLE})


def _value(kind: Any, value: Any, wrong: set[Place], place: Place) -> Any:
    """The value of a field, with sections and lists as far as they can be read; UNREADABLE where it is wrong."""
    if place in wrong:
        return UNREADABLE
    if isinstance(kind, type) and issubclass(kind, Model):
        return _section(kind, value, wrong, place) if isinstance(value, dict) else value
    if get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):  # a set or an iterator has no order to name its items by, or is used up
            return UNREADABLE
        return tuple(_value(get_args(kind)[0], item, wrong, (*place, index)) for index, item in enumerate(value))
    return value
