"""Dataclasses to plain data and back by pydantic: the one way in which kvgen writes what it keeps, sends and prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import PlainSerializer, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

J = TypeVar("J", bound="Json")

Facts = Annotated[Mapping[str, Any], PlainSerializer(dict)]
"""Plain data by name that is written as it is."""

adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)
"""pydantic's validator and writer of a type."""


class Json:
    """Base of the dataclasses that are written as JSON, by their annotations: `Field(exclude=True)`, `computed_field` and so on."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` reads it back."""
        try:
            data: dict[str, Any] = adapter(type(self)).dump_python(self, mode="json", by_alias=True)
        except PydanticSerializationError as error:  # pydantic wraps whatever ends one of our serializers, Ctrl-C too
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise error.__cause__ from None
            raise
        return data

    @classmethod
    def from_json(cls: type[J], data: Any) -> J:
        """Inverse of `to_json`; names that are no field are passed over. Raises ValueError, in one line, on other data."""
        try:
            value: J = adapter(cls).validate_python(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            named = (str(part) for part in first["loc"] if isinstance(part, int) or part.islower())  # not the member of a union
            place = ".".join(named)
            raise ValueError(f"{place or cls.__name__}: {first['msg']}") from None
        return value
