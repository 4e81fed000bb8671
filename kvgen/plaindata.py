"""Dataclasses to plain data and back, as JSON takes it: the one way in which kvgen writes what it keeps, sends and prints.

The form follows from a class's annotations, as pydantic reads them: `Field(alias=...)` names a field otherwise, `Field(exclude=True)`
leaves it out, `computed_field` adds a property, `Written` writes a value otherwise, `Shaped` validates plain data. pydantic is imported
when something is written or validated; classes that a fetch needs do without its names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema

J = TypeVar("J", bound="Json")


class Written:
    """How a value is written: what this function makes of it."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return {**handler(source), "serialization": core_schema.plain_serializer_function_ser_schema(self.function)}


class Shaped:
    """Plain data that is valid if a class can be made of it; it stays what it is, with names that the class lacks."""

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        def check(data: Any, validate: Callable[[Any], Any]) -> Any:
            validate(data)
            return data

        plain = handler(source)
        shape = core_schema.no_info_wrap_validator_function(check, handler.generate_schema(self.kind))
        return core_schema.chain_schema([plain, shape], serialization=plain.get("serialization"))


Facts = Annotated[Mapping[str, Any], Written(dict)]
"""Plain data by name that is written as it is."""


def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


adapter: Callable[[Any], TypeAdapter[Any]] = cache(_adapter)
"""pydantic's validator and writer of a type."""


class Json:
    """Base of the dataclasses that are written as JSON."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` reads it back."""
        data: dict[str, Any] = adapter(type(self)).dump_python(self, mode="json", by_alias=True)
        return data

    @classmethod
    def from_json(cls: type[J], data: Any) -> J:
        """Inverse of `to_json`; names that are no field are passed over. Raises ValueError, in one line, on other data."""
        from pydantic import ValidationError

        try:
            value: J = adapter(cls).validate_python(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            named = (str(part) for part in first["loc"] if isinstance(part, int) or part.islower())  # not the member of a union
            place = ".".join(named)
            raise ValueError(f"{place or cls.__name__}: {first['msg']}") from None
        return value


def rounded(digits: int) -> Written:
    """Write a number with so many digits after the point."""
    return Written(lambda value: round(value, digits))
