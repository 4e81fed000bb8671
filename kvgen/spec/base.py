"""What the classes of the spec language are made of. pydantic validates them and reads this; it is imported when the first spec is
validated, because its import takes longer than all else that a fetch imports of kvgen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_type_hints

from kvgen.spec.rules import Problem

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        """For type checkers alone."""
        return lambda cls: cls


M = TypeVar("M", bound="Model")


class Limits:
    """Limits of a field, by pydantic's names for its type."""

    def __init__(self, **limits: Any) -> None:
        self.limits = limits

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return {**handler(source), **self.limits}


class Step:
    """A function that a value goes through, before or after its type and limits are checked."""

    def __init__(self, when: Literal["before", "after"], function: Callable[[Any], Any]) -> None:
        self.when = when
        self.function = function

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        step = {"before": core_schema.no_info_before_validator_function, "after": core_schema.no_info_after_validator_function}[self.when]
        return step(self.function, handler(source))


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Model:
    """A dataclass, frozen and strict: an unknown field is a mistake, and "4" is not a number.

    Constructing one with mistakes raises SpecError with all of them.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, init=False)(cls)

    def __init__(self, **given: Any) -> None:
        from kvgen.spec.validation import constructed

        vars(self).update(vars(constructed(type(self), given)))

    @classmethod
    def trusted(cls: type[M], **given: Any) -> M:
        """From fields that were validated before, without validation; the others take their defaults. Raises TypeError if it has none."""
        model = object.__new__(cls)
        for one in fields(cls):
            value = given.get(one.name, one.default)
            if value is MISSING:
                raise TypeError(f"{one.name} is missing")
            vars(model)[one.name] = value
        return model

    def to_json(self) -> dict[str, Any]:
        """Plain data with every field."""
        return asdict(self)

    def problems(self) -> Iterable[Problem]:
        """What does not hold between fields that are right by themselves."""
        return ()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from kvgen.spec.validation import model_schema

        return model_schema(source, handler)


def hints(model: type[Model]) -> dict[str, Any]:
    """Types of a model's fields by name, without limits and steps."""
    found = get_type_hints(model)
    return {one.name: found[one.name] for one in fields(model)}
