"""Search spaces: parameters with their values, constraints and hints with reasons, read from `search_spaces/*.yaml`.

A file has a `layout` and a `launch` part (name -> values and doc; `times` names a fact that multiplies the values), a list of
constraints and a list of hints. Both are Python expressions over parameters, the facts that a back end supplies about spec and target,
and the workload (`batch`, `kv_len`, `q_len`; `tokens`, `channels` of a matrix). They are evaluated as soon as all their names are known,
once per combination of these.

A constraint excludes what cannot be lowered or run; `check` reports it. A hint excludes what did not pay where it was measured: schedules
that satisfy all constraints and all hints are what a search tries, and any other schedule that the constraints allow can be built.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from kvgen._resources import search_spaces
from kvgen.errors import KvgenError
from kvgen.lower.expression import Expression
from kvgen.lower.schedule import Params, Schedule, Value
from kvgen.spec import AnyWorkload, KernelSpec, QuantSpec, Workload
from kvgen.spec.workloads import shape_of

Part = Literal["layout", "launch"]
Fact = Value | float | None | Callable[..., Any]


@dataclass(frozen=True)
class Parameter:
    """One axis of the space. `docs` has the meanings of values, if the file gives them."""

    name: str
    part: Part
    values: tuple[Value, ...]
    doc: str
    docs: Mapping[Value, str] = field(default_factory=dict, hash=False)
    times: str | None = None
    """A fact that multiplies the values of the file."""

    def of_facts(self, facts: Mapping[str, Fact]) -> Parameter:
        """The parameter of one spec and target. Raises KvgenError if `times` is no fact."""
        if self.times is None:
            return self
        factor = facts.get(self.times)
        if not isinstance(factor, int):
            raise KvgenError(f"parameter {self.name} is multiplied by {self.times}, which is no fact of the back end")
        return replace(self, values=tuple(int(value) * factor for value in self.values), docs={}, times=None)


@dataclass(frozen=True)
class Constraint:
    """A condition that a schedule must (or, as a hint, should) satisfy, and the reason to report otherwise. `reason` may contain values
    in {braces}.
    """

    require: Expression
    reason: str

    @property
    def names(self) -> frozenset[str]:
        """Parameters, facts and workload names that the expression mentions."""
        return self.require.names


class _File(NamedTuple):
    """Contents of a file: what does not depend on a spec or a target."""

    backend: str
    parameters: tuple[Parameter, ...]
    constraints: tuple[Constraint, ...]
    hints: tuple[Constraint, ...]


@cache
def _read(path: Path) -> _File:
    """A file, parsed and its expressions compiled. Raises KvgenError where it is malformed."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        parameters = tuple(_parameter(name, part, entry) for part in get_args(Part) for name, entry in data[part].items())
        constraints = tuple(Constraint(Expression(c["require"]), c["reason"]) for c in data["constraints"])
        hints = tuple(Constraint(Expression(h["prefer"]), h["reason"]) for h in data.get("hints", ()))
        return _File(data["backend"], parameters, constraints, hints)
    except (KeyError, TypeError, ValueError, SyntaxError, OSError, yaml.YAMLError) as error:
        raise KvgenError(f"search space {path.name} cannot be read: {error}") from error


def _parameter(name: str, part: Part, entry: Mapping[str, Any]) -> Parameter:
    values = entry["values"]
    docs = values if isinstance(values, dict) else {}
    return Parameter(name, part, tuple(values), entry["doc"], docs, entry.get("times"))


class SearchSpace:
    """The schedules of one back end for one spec and target; iteration order is that of the file."""

    def __init__(
        self,
        backend: str,
        parameters: Iterable[Parameter],
        constraints: Iterable[Constraint] = (),
        facts: Mapping[str, Fact] | None = None,
        workloads: Iterable[AnyWorkload] = (),
        hints: Iterable[Constraint] = (),
    ) -> None:
        """Raises KvgenError if a constraint or hint uses a name that is not a parameter, fact or workload name."""
        self.backend = backend
        self.parameters = tuple(parameters)
        self.constraints = tuple(constraints)
        self.hints = tuple(hints)
        self.facts = dict(facts or {})
        self.workloads: tuple[AnyWorkload, ...] = tuple(workloads) or (Workload(batch=1, kv_len=4096),)
        self._workload_names = frozenset(shape_of(self.workloads[0]))
        self._names: dict[Part, tuple[str, ...]] = {
            part: tuple(p.name for p in self.parameters if p.part == part) for part in ("layout", "launch")
        }
        self._rules = (*self.constraints, *self.hints)
        self._uses = tuple(tuple(sorted(rule.names - self.facts.keys())) for rule in self._rules)
        self._verdicts: dict[tuple[Any, ...], str | None] = {}
        known = {p.name for p in self.parameters} | self.facts.keys() | self._workload_names
        for rule in self._rules:
            if unknown := sorted(rule.names - known):
                raise KvgenError(f"search space {backend}: `{rule.require}` mentions unknown {', '.join(unknown)}")

    @classmethod
    def load(cls, name: str, facts: Mapping[str, Fact], workloads: Iterable[AnyWorkload]) -> SearchSpace:
        """The space of `search_spaces/<name>.yaml`, which is read once per process. Raises KvgenError if the file is malformed."""
        read = _read(search_spaces() / f"{name}.yaml")
        parameters = [parameter.of_facts(facts) for parameter in read.parameters]
        return cls(read.backend, parameters, read.constraints, facts, workloads, read.hints)

    def without_hints(self) -> SearchSpace:
        """The space of all that can be built."""
        return SearchSpace(self.backend, self.parameters, self.constraints, self.facts, self.workloads)

    # --- schedules -------------------------------------------------------------------------------------------------

    def layouts(self) -> list[Params]:
        """Every layout part that neither a constraint nor a hint on layout parameters alone excludes."""
        return list(self._walk("layout", {}, self._all["layout"]))

    def launches(self, layout: Params, workload: AnyWorkload) -> list[Params]:
        """Every launch part that is worth trying with the layout for the workload."""
        fixed = {**layout, **shape_of(workload)}
        return list(self._walk("launch", fixed, self._all["launch"] + self._all["workload"]))

    def schedules(self) -> Iterator[Schedule]:
        """Every schedule that is worth trying for at least one of the space's workloads."""
        for layout in self.layouts():
            lists = [self.launches(layout, work) for work in self.workloads]
            allowed = dict.fromkeys(itertools.chain.from_iterable(lists))
            ordered = lists[0] if len(lists) == 1 else [launch for launch in self._raw_launches if launch in allowed]
            yield from (Schedule(self.backend, layout, launch) for launch in ordered)

    def excluded(self) -> Iterator[tuple[Params, list[str]]]:
        """Schedules that cannot be built, with reasons: first layout parts, then whole schedules of the other layouts."""
        return self._outside(self._required)

    def unsearched(self) -> Iterator[tuple[Params, list[str]]]:
        """Schedules that can be built and are not searched, with the hints that exclude them, in the same order."""
        return self._outside(self._all, but=self._required)

    def _outside(self, stages: Mapping[str, list[int]], but: Mapping[str, list[int]] | None = None) -> Iterator[tuple[Params, list[str]]]:
        """What the rules exclude, except what those of `but` exclude."""
        for layout in self._raw_layouts:
            if but is not None and self._reasons(layout, but["layout"]):
                continue
            if reasons := self._reasons(layout, stages["layout"]):
                yield layout, reasons
                continue
            for launch in self._raw_launches:
                params: dict[str, Value] = {**layout, **launch}
                if but is not None and self._launch_reasons(params, but):
                    continue
                if reasons := self._launch_reasons(params, stages):
                    yield Params(params), reasons

    def check(self, schedule: Schedule, workload: AnyWorkload | None = None) -> list[str]:
        """Why a schedule cannot be built; empty if it can. Without a workload, only rules that hold for every workload."""
        return self._problems(schedule, workload, self._required)

    def doubts(self, schedule: Schedule, workload: AnyWorkload | None = None) -> list[str]:
        """Why a search does not try a schedule: what `check` says, then the hints against it. Empty for a schedule of the space."""
        return self._problems(schedule, workload, self._all)

    def _problems(self, schedule: Schedule, workload: AnyWorkload | None, stages: Mapping[str, list[int]]) -> list[str]:
        if schedule.backend != self.backend:
            return [f"the schedule is for {schedule.backend}, the space for {self.backend}"]
        problems = self._name_problems(schedule)
        if problems:
            return problems
        params: dict[str, Value] = {**schedule.layout, **schedule.launch}
        if reasons := self._reasons(params, self._required["layout"]):
            return reasons  # sizes of a launch are computed from a layout that exists
        reasons = self._reasons(params, stages["layout"] + stages["launch"])
        if workload is not None:
            reasons += self._reasons({**params, **shape_of(workload)}, stages["workload"])
        return reasons

    @property
    def raw_size(self) -> int:
        """Schedules before constraints."""
        size = 1
        for parameter in self.parameters:
            size *= len(parameter.values)
        return size

    @cached_property
    def size(self) -> int:
        """Schedules that constraints and hints leave."""
        return sum(1 for _ in self.schedules())

    def to_json(self) -> dict[str, Any]:
        """Plain data: parameters, constraints, hints, facts that are values, sizes."""
        return {
            "backend": self.backend,
            "parameters": [
                {"name": p.name, "part": p.part, "values": list(p.values), "doc": p.doc, "docs": {str(k): v for k, v in p.docs.items()}}
                for p in self.parameters
            ],
            "constraints": [{"require": str(c.require), "reason": c.reason} for c in self.constraints],
            "hints": [{"prefer": str(h.require), "reason": h.reason} for h in self.hints],
            "facts": {name: fact for name, fact in sorted(self.facts.items()) if not callable(fact)},
            "raw_size": self.raw_size,
            "size": self.size,
        }

    # --- judging ---------------------------------------------------------------------------------------------------

    @cached_property
    def _required(self) -> dict[str, list[int]]:
        """Indices of the constraints by the stage at which all they mention is known."""
        return self._staged(len(self.constraints))

    @cached_property
    def _all(self) -> dict[str, list[int]]:
        """The same of constraints and hints."""
        return self._staged(len(self._rules))

    def _staged(self, count: int) -> dict[str, list[int]]:
        """The first `count` rules by stage."""
        stages: dict[str, list[int]] = {"layout": [], "launch": [], "workload": []}
        for index, uses in enumerate(self._uses[:count]):
            mentions = set(uses)
            if mentions & self._workload_names:
                stages["workload"].append(index)
            else:
                stages["launch" if mentions & set(self._names["launch"]) else "layout"].append(index)
        return stages

    @cached_property
    def _shapes(self) -> list[Mapping[str, Value]]:
        return [shape_of(work) for work in self.workloads]

    @cached_property
    def _raw_layouts(self) -> list[Params]:
        return self._product("layout")

    @cached_property
    def _raw_launches(self) -> list[Params]:
        return self._product("launch")

    def _product(self, part: Part) -> list[Params]:
        chosen = [p for p in self.parameters if p.part == part]
        return [Params(dict(zip(self._names[part], values, strict=True))) for values in itertools.product(*(p.values for p in chosen))]

    def _walk(self, part: Part, fixed: Mapping[str, Value], checks: Iterable[int]) -> Iterator[Params]:
        """The allowed values of one part in file order; a constraint is judged once the last parameter that it mentions is chosen."""
        chosen = [p for p in self.parameters if p.part == part]
        due: list[list[int]] = [[] for _ in range(len(chosen) + 1)]
        for index in checks:
            due[max((depth for depth, p in enumerate(chosen, 1) if p.name in self._uses[index]), default=0)].append(index)
        scope = dict(fixed)

        def extend(depth: int) -> Iterator[Params]:
            if any(self._verdict(index, scope) is not None for index in due[depth]):
                return
            if depth == len(chosen):
                yield Params({name: scope[name] for name in self._names[part]})
                return
            for value in chosen[depth].values:
                scope[chosen[depth].name] = value
                yield from extend(depth + 1)

        return extend(0)

    def _reasons(self, names: Mapping[str, Value], checks: Iterable[int]) -> list[str]:
        found = (self._verdict(index, names) for index in checks)
        return [reason for reason in found if reason is not None]

    def _launch_reasons(self, params: Mapping[str, Value], stages: Mapping[str, list[int]]) -> list[str]:
        """Why no workload allows the launch; if they differ, in the words of the first workload."""
        static = self._reasons(params, stages["launch"])
        first: list[str] | None = None
        for shape in self._shapes:
            reasons = self._reasons({**params, **shape}, stages["workload"])
            if not reasons:
                return static
            first = reasons if first is None else first
        return static + (first or [])

    def _verdict(self, index: int, names: Mapping[str, Value]) -> str | None:
        """The reason if the constraint or hint fails, else None; remembered by the values it mentions."""
        key = (index, *[names[name] for name in self._uses[index]])
        if key not in self._verdicts:
            rule = self._rules[index]
            scope: dict[str, Any] = {**self.facts, **names}
            self._verdicts[key] = None if rule.require(scope) else rule.reason.format_map(scope)
        return self._verdicts[key]

    def _name_problems(self, schedule: Schedule) -> list[str]:
        problems = []
        for part, given in (("layout", schedule.layout), ("launch", schedule.launch)):
            expected = {p.name: p.values for p in self.parameters if p.part == part}
            problems += [f"{part} parameter {name} is not known" for name in given if name not in expected]
            problems += [f"{part} parameter {name} is missing" for name in expected if name not in given]
            problems += [
                f"{name} = {value!r} is not one of {', '.join(map(str, expected[name]))}"
                for name, value in given.items()
                if name in expected and not _is_one_of(value, expected[name])
            ]
        return problems


def _is_one_of(value: Value, values: Iterable[Value]) -> bool:
    """Whether a value is among those of a parameter, and of their type: Python has `True == 1`."""
    return any(type(value) is type(other) and value == other for other in values)


def spec_facts(spec: KernelSpec) -> dict[str, Fact]:
    """Facts of a spec that constraints of every back end may mention. `page` is 0 for contiguous caches."""

    def channel_group(quant: QuantSpec) -> int:
        return quant.group if quant.per_channel else 1

    attention = spec.attention
    facts: dict[str, Fact] = {
        "kv_heads": attention.kv_heads,
        "gqa": attention.group,
        "head_dim": attention.head_dim,
        "dtype": attention.dtype,
        "page": spec.cache.page or 0,
    }
    for label, quant in (("key", spec.key), ("value", spec.value)):
        facts |= {f"{label}_bits": quant.bits, f"{label}_axis": quant.axis, f"{label}_group": quant.group}
        facts |= {f"{label}_per_channel": quant.per_channel, f"{label}_group_tokens": channel_group(quant)}
    return facts
