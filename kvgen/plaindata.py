"""Dataclasses to plain data and back, as JSON takes it: the one way in which kvgen writes what it keeps, sends and prints.

The form follows from a class's annotations, as pydantic reads them: `Field(alias=...)` names a field otherwise, `Field(exclude=True)`
leaves it out, `computed_field` adds a property, `PlainSerializer` writes a value otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import PlainSerializer, TypeAdapter, ValidationError

J = TypeVar("J", bound="Json")

Facts = Annotated[Mapping[str, Any], PlainSerializer(dict)]
"""Plain data by name that is written as it is."""


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


class Json:
    """Base of the dataclasses that are written as JSON."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` reads it back."""
        data: dict[str, Any] = _adapter(type(self)).dump_python(self, mode="json", by_alias=True)
        return data

    @classmethod
    def from_json(cls: type[J], data: Any) -> J:
        """Inverse of `to_json`; names that are no field are passed over. Raises ValueError, in one line, on other data."""
        try:
            value: J = _adapter(cls).validate_python(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            raise ValueError(f"{'.'.join(map(str, first['loc'])) or cls.__name__}: {first['msg']}") from None
        return value


def rounded(digits: int) -> PlainSerializer:
    """Write a number with so many digits after the point."""
    return PlainSerializer(lambda value: round(value, digits))
