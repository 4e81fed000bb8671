"""From JSON back to the dataclasses that it was written from, without validation: for data that was validated before.

The form follows from the annotations, as for pydantic, which is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Make = Callable[[Any], Any]


def construct(kind: type[T], data: Any) -> T:
    """The value that `data` was written from. Names that are no field are passed over, and fields without data take their defaults.

    Raises TypeError, ValueError or AttributeError on other data, but not on all of it.
    """
    value: T = _maker(kind)(data)
    return value


def _make(kind: Any) -> Make:
    """What makes a value of a type from its JSON. Scalars, and mappings of anything, are their JSON."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _maker(inner[0])
    if origin in (Union, UnionType) and len(inner) == 2 and NoneType in inner:
        some = _maker(next(one for one in inner if one is not NoneType))
        return lambda data: None if data is None else some(data)
    if origin in (Union, UnionType):
        return _union_maker(inner)
    if origin is tuple:
        item = _maker(inner[0])
        return lambda data: tuple(map(item, data))
    if origin is Mapping and inner[1] is not Any:
        value = _maker(inner[1])
        return lambda data: {name: value(one) for name, one in data.items()}
    if is_dataclass(kind):
        return _dataclass_maker(kind)
    return kind if hasattr(kind, "__get_pydantic_core_schema__") else _itself


_maker: Callable[[Any], Make] = cache(_make)


def _union_maker(kinds: tuple[Any, ...]) -> Make:
    """Of several dataclasses, the first whose fields without default are in the data."""
    needed = [(_maker(kind), {one.name for one in fields(kind) if one.init and one.default is MISSING}) for kind in kinds]

    def make(data: Any) -> Any:
        maker = next((maker for maker, names in needed if names <= data.keys()), None)
        if maker is None:
            raise TypeError("the data has the fields of none of its types")
        return maker(data)

    return make


def _dataclass_maker(kind: Any) -> Make:
    hints = get_type_hints(kind)
    makers = {one.name: _maker(hints[one.name]) for one in fields(kind) if one.init}
    made = getattr(kind, "trusted", kind)
    return lambda data: made(**{name: make(data[name]) for name, make in makers.items() if name in data})


def _itself(data: Any) -> Any:
    return data
