"""A schedule: how a spec is computed. The layout part is fixed while a cache lives, the launch part may differ per workload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast, get_args

from kvgen.digest import digest
from kvgen.format.layout import Order, PackedLayout, packed_layout
from kvgen.plaindata import Json
from kvgen.spec import AnySpec, KernelSpec, LinearSpec, MatrixSpec

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

Value = int | str | bool


class Params(Mapping[str, Value]):
    """A small immutable, hashable mapping of parameter names to scalars."""

    __slots__ = ("_values",)

    def __init__(self, items: Mapping[str, Value] | None = None, **more: Value) -> None:
        self._values = dict(sorted({**(items or {}), **more}.items()))

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def __eq__(self, other: object) -> bool:
        return self._values == (other._values if isinstance(other, Params) else other)

    def __repr__(self) -> str:
        return "Params(" + ", ".join(f"{k}={v!r}" for k, v in self._values.items()) + ")"

    def __str__(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self._values.items()) or "-"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        written = core_schema.plain_serializer_function_ser_schema(dict)
        return core_schema.no_info_after_validator_function(cls, handler(dict[str, Value]), serialization=written)

    def integer(self, name: str) -> int:
        """The parameter as an int; TypeError where it is none."""
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}, not an integer")
        return value

    def text(self, name: str) -> str:
        """The parameter as a string; TypeError where it is none."""
        value = self[name]
        if not isinstance(value, str):
            raise TypeError(f"{name} is {value!r}, not a string")
        return value


@dataclass(frozen=True, slots=True)
class Schedule(Json):
    """One member of a back end's search space."""

    backend: str
    layout: Params
    launch: Params

    @property
    def id(self) -> str:
        """Digest of the whole schedule."""
        return digest(self.to_json())

    @property
    def exact(self) -> bool:
        """Whether its kernel carries the rounding errors that `exact_q: false` leaves out (docs/numerics.md). All without `exact_q` do."""
        return bool(self.launch.get("exact_q", True))

    def __str__(self) -> str:
        return f"{self.backend}[{self.layout} | {self.launch}]"


FIXED_LAYOUTS = {
    MatrixSpec: digest(["row-major", "int8 codes", "float32 scales per channel"]),
    LinearSpec: digest(["packed weights", 1]),
}
"""Ids of the layouts of operations whose schedules choose none. That of packed weights counts the versions of docs/linear.md."""


def layout_of(spec: KernelSpec, part: Params) -> PackedLayout:
    """The packed layout that a layout part means for a spec, whichever back end the launch is of.

    Raises KeyError or TypeError where a parameter is absent or of another type, ValueError where the order is unknown or the layout
    cannot hold the spec.
    """
    order = part.text("order")
    if order not in get_args(Order):
        raise ValueError(f"unknown order {order!r} in the layout part {part}")
    return packed_layout(spec, part.integer("block"), cast(Order, order))


def layout_id(spec: AnySpec, part: Params) -> str:
    """Id of the layout that a layout part means for a spec: of packed blocks, or of the matrices that an operation reads and writes.

    Raises as `layout_of` does.
    """
    if isinstance(spec, KernelSpec):
        return layout_of(spec, part).id
    if part:
        raise ValueError(f"the operation {spec.operation} has no layout parameters, and the layout part is {part}")
    return FIXED_LAYOUTS[type(spec)]
