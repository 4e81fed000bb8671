"""Validation of specs by pydantic, which is imported here: with the first spec that no process validated before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from kvgen.errors import SpecError, SpecIssue
from kvgen.plaindata import adapter
from kvgen.spec import rules
from kvgen.spec.base import Model
from kvgen.spec.issues import RULE, LineOf, in_order, no_line, path_text, spec_error, spec_issues
from kvgen.spec.limits import UNREADABLE
from kvgen.spec.matrix import MatrixShape, MatrixSpec, listed_twice
from kvgen.spec.model import KernelSpec
from kvgen.spec.operations import AnySpec
from kvgen.spec.partial import partial_spec
from kvgen.spec.presets import start_from

M = TypeVar("M", bound=Model)


def validated(model: type[M], data: Mapping[str, Any]) -> M:
    """The model with these fields. Raises ValidationError with all mistakes."""
    checked: M = adapter(model).validate_python(data)
    return checked


def constructed(model: type[M], fields: Mapping[str, Any]) -> M:
    """The same for a model that is constructed in Python. Raises SpecError with all mistakes."""
    try:
        return validated(model, fields)
    except ValidationError as error:
        raise spec_error(error, model) from None


def model_schema(model: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    """A model from a mapping or from itself, with its rules."""
    schema = handler(model)
    inner: Any = handler.resolve_ref_schema(schema)
    inner["strict"] = False  # a mapping may be given; its fields are strict
    return core_schema.no_info_after_validator_function(_consistent, schema)


def _consistent(model: M) -> M:
    """The model itself. Raises all its problems as one pydantic error, each at its own place."""
    details = [
        InitErrorDetails(type=PydanticCustomError(RULE, "{reason}", {"reason": reason}), loc=place, input=None)
        for place, reason in model.problems()
    ]
    if details:
        raise ValidationError.from_exception_data(type(model).__name__, details)
    return model


def spec_of(data: Any, found: Sequence[SpecIssue], line_of: LineOf = no_line, name: str | None = None) -> tuple[AnySpec, tuple[str, ...]]:
    """The spec in plain data, of the `operation` that it names, else of attention; and notes of where it differs from its preset.

    Raises SpecError with all of `found` and the mistakes in `data`; `name` is that of its file.
    """
    issues = list(found)
    if data is UNREADABLE:
        raise SpecError(issues, name)
    if not isinstance(data, dict):
        raise SpecError([*issues, SpecIssue("", "a spec is a mapping of sections (attention, key, value, ...)", line_of(()))], name)
    if "operation" in data:
        return _matrix_spec(data, issues, line_of, name), ()
    notes: tuple[str, ...] = ()
    if "preset" in data:
        line_of = _or_preset_line(line_of, data)
        data, problem, notes = start_from(data)
        if problem:
            issues.append(replace(problem, line=line_of((problem.path,))))
    try:
        spec = validated(KernelSpec, data)
    except ValidationError as error:
        issues += spec_issues(error, KernelSpec, line_of)
        readable = partial_spec(data, error)
        issues += [SpecIssue(path_text(place), reason, line_of(place)) for place, reason in rules.problems(readable)]
    if issues:
        raise SpecError(in_order(issues), name)
    return spec, notes


def _matrix_spec(data: dict[str, Any], issues: list[SpecIssue], line_of: LineOf, name: str | None) -> MatrixSpec:
    try:
        spec = validated(MatrixSpec, data)
    except ValidationError as error:
        issues += spec_issues(error, MatrixSpec, line_of)
        issues += [SpecIssue(path_text(place), reason, line_of(place)) for place, reason in listed_twice(_readable_shapes(data))]
    if issues:
        raise SpecError(in_order(issues), name)
    return spec


def _readable_shapes(data: dict[str, Any]) -> Iterator[tuple[int, MatrixShape]]:
    """The workloads without a mistake, with their places in the list."""
    listed = data.get("workloads")
    for index, item in enumerate(listed) if isinstance(listed, (list, tuple)) else ():
        with suppress(ValidationError):
            yield index, validated(MatrixShape, item)


def _or_preset_line(line_of: LineOf, written: dict[str, Any]) -> LineOf:
    """Sections that a preset brought have its line."""
    return lambda place: line_of(place if place and place[0] in written else ("preset",))
