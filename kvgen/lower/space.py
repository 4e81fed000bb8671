"""Search spaces: parameters with their values and meanings from `search_spaces/*.yaml`, and a back end's rules with reasons.

A *constraint* excludes what cannot be lowered or run; `check` reports it. A *hint* excludes what did not pay where it was measured:
schedules that satisfy all constraints and all hints are what a search tries, and any other schedule that the constraints allow can be
built. Both read parameters, facts that a back end supplies about spec and target, and the workload (`batch`, `kv_len`, `q_len`; `tokens`,
`channels` of a matrix; `m` rows of a linear layer). A rule is judged as soon as all that it reads is known, once per combination of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

from kvgen._resources import search_spaces
from kvgen.errors import KvgenError
from kvgen.format.codecs import codec_of
from kvgen.lower.constraints import RULES, Rule
from kvgen.lower.schedule import Params, Schedule, Value
from kvgen.spec import AnyWorkload, KernelSpec, QuantSpec, Workload

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


@cache
def _read(path: Path) -> Any:
    """A file of parameters."""
    import yaml

    return yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


class SearchSpace:
    """The schedules of one back end for one spec and target; iteration order is that of the file."""

    def __init__(
        self,
        backend: str,
        parameters: Iterable[Parameter],
        constraints: Iterable[Rule] = (),
        facts: Mapping[str, Fact] | None = None,
        workloads: Iterable[AnyWorkload] = (),
        hints: Iterable[Rule] = (),
        *,
        measured: bool = True,
    ) -> None:
        """`measured`: the hints hold for devices of this target.

        Raises KvgenError if a rule reads what is no parameter, fact or workload name.
        """
        self.backend = backend
        self.parameters = tuple(parameters)
        self.constraints = tuple(constraints)
        self.hints = tuple(hints)
        self.measured = measured
        self.facts = dict(facts or {})
        self.workloads: tuple[AnyWorkload, ...] = tuple(workloads) or (Workload(batch=1, kv_len=4096),)
        self._verdicts: dict[tuple[Any, ...], str | None] = {}
        shape, of_launch = self.workloads[0].numbers, {p.name for p in self.parameters if p.part == "launch"}
        known = {p.name for p in self.parameters} | self.facts.keys() | shape.keys()
        self._rules: dict[str, list[tuple[Rule, tuple[str, ...], bool]]] = {"layout": [], "launch": [], "workload": []}
        """By the stage at which all that it reads is known: a rule, what it reads beside facts, and whether it is a constraint."""
        for rule, required in (*((rule, True) for rule in self.constraints), *((rule, False) for rule in self.hints)):
            if unknown := sorted(set(rule.names) - known):
                raise KvgenError(f"search space {backend}: the rule `{rule.reason}` mentions unknown {', '.join(unknown)}")
            uses = tuple(name for name in rule.names if name not in self.facts)
            stage = "workload" if shape.keys() & set(uses) else "launch" if of_launch & set(uses) else "layout"
            self._rules[stage].append((rule, uses, required))

    @classmethod
    def load(cls, name: str, facts: Mapping[str, Fact], workloads: Iterable[AnyWorkload]) -> SearchSpace:
        """The space of `search_spaces/<name>.yaml`, which is read once per process, with its `RULES`. `times` of a parameter names a fact
        that multiplies its values.
        """
        data, rules = _read(search_spaces() / f"{name}.yaml"), RULES[name]
        parameters = []
        for part in get_args(Part):
            for parameter, entry in data[part].items():
                values, factor = entry["values"], facts[entry["times"]] if "times" in entry else None
                docs = values if isinstance(values, dict) else {}
                scaled = tuple(values) if factor is None else tuple(value * factor for value in values)
                parameters.append(Parameter(parameter, part, scaled, entry["doc"], docs))
        measured = facts.get("target", "cpu") in rules.measured
        return cls(name.partition("-")[0], parameters, rules.constraints, facts, workloads, rules.hints, measured=measured)

    @property
    def searched(self) -> SearchSpace:
        """What a build searches: on devices of a target on which no hint was measured, all that can be built."""
        return self if self.measured else self.without_hints()

    def without_hints(self) -> SearchSpace:
        """The space of all that can be built."""
        return SearchSpace(self.backend, self.parameters, self.constraints, self.facts, self.workloads)

    # --- schedules -------------------------------------------------------------------------------------------------

    def layouts(self) -> list[Params]:
        """Every layout part that neither a constraint nor a hint on layout parameters alone excludes."""
        return list(self._walk("layout", {}, ("layout",)))

    def launches(self, layout: Params, workload: AnyWorkload) -> list[Params]:
        """Every launch part that is worth trying with the layout for the workload."""
        return list(self._walk("launch", {**layout, **workload.numbers}, ("launch", "workload")))

    def schedules_at(self, workload: AnyWorkload) -> list[Schedule]:
        """Every schedule that is worth trying for the workload."""
        return [Schedule(self.backend, layout, launch) for layout in self.layouts() for launch in self.launches(layout, workload)]

    def schedules(self) -> Iterator[Schedule]:
        """Every schedule that is worth trying for at least one of the space's workloads."""
        for layout in self.layouts():
            lists = [self.launches(layout, work) for work in self.workloads]
            yield from (Schedule(self.backend, layout, launch) for launch in dict.fromkeys(itertools.chain.from_iterable(lists)))

    def excluded(self, *, hints: bool = False) -> Iterator[tuple[Schedule, list[str]]]:
        """Schedules that cannot be built for any of the space's workloads, with the reasons; with `hints` those that can be built and are
        not searched.
        """
        for layout, launch in itertools.product(self._product("layout"), self._product("launch")):
            params = {**layout, **launch}
            reasons = self._reasons_everywhere(params, hints=False)
            if hints:
                reasons = [] if reasons else self._reasons_everywhere(params, hints=True)
            if reasons:
                yield Schedule(self.backend, layout, launch), reasons

    def check(self, schedule: Schedule, workload: AnyWorkload | None = None, *, hints: bool = False) -> list[str]:
        """Why a schedule cannot be built; empty if it can. Without a workload, only rules that hold for every workload."""
        if schedule.backend != self.backend:
            return [f"the schedule is for {schedule.backend}, the space for {self.backend}"]
        return self._name_problems(schedule) or self._reasons({**schedule.layout, **schedule.launch}, workload, hints=hints)

    def doubts(self, schedule: Schedule, workload: AnyWorkload | None = None) -> list[str]:
        """Why a search does not try a schedule: what `check` says, then the hints against it. Empty for a schedule of the space."""
        return self.check(schedule, workload, hints=True)

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
            "constraints": [{"reads": list(c.names), "reason": c.reason} for c in self.constraints],
            "hints": [{"reads": list(h.names), "reason": h.reason} for h in self.hints],
            "facts": {name: fact for name, fact in sorted(self.facts.items()) if not callable(fact)},
            "raw_size": self.raw_size,
            "size": self.size,
        }

    # --- judging ---------------------------------------------------------------------------------------------------

    def _product(self, part: Part) -> list[Params]:
        chosen = {p.name: p.values for p in self.parameters if p.part == part}
        return [Params(dict(zip(chosen, values, strict=True))) for values in itertools.product(*chosen.values())]

    def _walk(self, part: Part, fixed: Mapping[str, Value], stages: tuple[str, ...]) -> Iterator[Params]:
        """The allowed values of one part in file order; a rule is judged once the last parameter that it mentions is chosen."""
        chosen = [p for p in self.parameters if p.part == part]
        due: list[list[tuple[Rule, tuple[str, ...]]]] = [[] for _ in range(len(chosen) + 1)]
        for rule, uses, _ in itertools.chain.from_iterable(self._rules[stage] for stage in stages):
            due[max((depth for depth, p in enumerate(chosen, 1) if p.name in uses), default=0)].append((rule, uses))
        scope = dict(fixed)

        def extend(depth: int) -> Iterator[Params]:
            if any(self._verdict(rule, uses, scope) is not None for rule, uses in due[depth]):
                return
            if depth == len(chosen):
                yield Params({p.name: scope[p.name] for p in chosen})
                return
            for value in chosen[depth].values:
                scope[chosen[depth].name] = value
                yield from extend(depth + 1)

        return extend(0)

    def _reasons_everywhere(self, params: Mapping[str, Value], *, hints: bool) -> list[str]:
        """Why no workload allows a schedule; if they differ, in the words of the first workload."""
        of_workloads = [self._reasons(params, work, hints=hints) for work in self.workloads]
        return of_workloads[0] if all(of_workloads) else []

    def _reasons(self, params: Mapping[str, Value], workload: AnyWorkload | None, *, hints: bool) -> list[str]:
        def broken(stage: str, hints: bool) -> list[str]:
            found = (self._verdict(rule, uses, names) for rule, uses, required in self._rules[stage] if hints or required)
            return [reason for reason in found if reason is not None]

        names = {**params, **(workload.numbers if workload else {})}
        if reasons := broken("layout", False):
            return reasons  # sizes of a launch are computed from a layout that exists
        return [reason for stage in ("layout", "launch", *(["workload"] if workload else [])) for reason in broken(stage, hints)]

    def _verdict(self, rule: Rule, uses: tuple[str, ...], names: Mapping[str, Value]) -> str | None:
        """The reason if the rule is broken, else None; remembered by the values it mentions."""
        key = (id(rule), *[names[name] for name in uses])
        if key not in self._verdicts:
            scope: dict[str, Any] = {**self.facts, **names}
            self._verdicts[key] = None if rule.holds(SimpleNamespace(**scope)) else rule.reason.format_map(scope)
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
                if name in expected and not any(type(value) is type(one) and value == one for one in expected[name])  # True == 1
            ]
        return problems


def spec_facts(spec: KernelSpec) -> dict[str, Fact]:
    """Facts of a spec that rules of every back end may mention. `page` is 0 for contiguous caches."""

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
        facts |= {
            f"{label}_bits": quant.bits,
            f"{label}_axis": quant.axis if quant.grouped or not quant.quantized else "channel",
            f"{label}_group": quant.group,
        }
        facts |= {f"{label}_integers": codec_of(quant).integers, f"{label}_codes": codec_of(quant).label}
        facts |= {f"{label}_per_channel": quant.per_channel, f"{label}_group_tokens": channel_group(quant)}
    return facts
