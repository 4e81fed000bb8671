"""What `get_kernel` takes where nothing was measured: the defaults and the plain schedule of the first back end that supports a format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvgen._machine import vector_bits, vector_registers
from kvgen.arch import Target
from kvgen.digest import canonical_json
from kvgen.errors import UnsupportedError
from kvgen.lower import backends
from kvgen.lower.base import Source
from kvgen.lower.defaults import Defaults, defaults_of
from kvgen.lower.schedule import Schedule
from kvgen.plaindata import Json
from kvgen.registry.dispatch import DispatchTable, Launch, smallest
from kvgen.registry.entry import Code, Entry
from kvgen.registry.select import Selection
from kvgen.spec import AnySpec, AnyWorkload, KernelSpec
from kvgen.spec.traffic import parse
from kvgen.spec.waves import Waves
from kvgen.toolchain import Artifact
from kvgen.validated import recall, record


def serving_entry(spec: AnySpec, target: Target, selection: Selection) -> tuple[Entry, Selection]:
    """The entry whose launches serve calls: that of a selection with the defaults beside it, else the defaults alone. The selection has it
    where it comes from the registry. Raises UnsupportedError where no back end supports the spec.
    """
    if selection.entry is None:
        return default_entry(spec, target, selection)
    entry = with_defaults(selection.entry)
    return entry, selection._replace(entry=entry)


def default_entry(spec: AnySpec, target: Target, selection: Selection) -> tuple[Entry, Selection]:
    """An entry that is in no store, and the selection with a caution that says so.

    Raises UnsupportedError where no back end supports the spec.
    """
    backend, reasons = backends.first_for(spec, target)
    if backend is None:
        raise UnsupportedError(f"no kernel for {spec.name} on {target}", "; ".join((*reasons, *selection.why)), is_backend=False)
    defaults = defaults_of(backend, spec, target)
    sources = {schedule: (backend.lower(spec, schedule, target), None) for schedule in defaults.schedules()}
    entry = untuned_entry(spec, target, defaults, sources, device={})
    caution = f"nothing is tuned for this format on {target}; using {backend.name}'s default schedules"
    return entry, selection._replace(cautions=(caution, *selection.cautions))


@dataclass(frozen=True)
class Beside(Json):
    """What `with_defaults` adds to an entry. Without a table, nothing."""

    codes: Mapping[str, Code] = field(default_factory=dict)
    """Of further launches, by file."""
    table: DispatchTable | None = None


def with_defaults(entry: Entry) -> Entry:
    """A tuned entry with the defaults of the grid's workloads and the plain schedule as further launches, for calls that are nearer to
    those workloads than to the ones that it was tuned for. They are lowered and not compiled.

    An entry with a dispatch table stays as it is, as do an untuned one, one of operations on a matrix, and one whose layout the defaults of
    the first back end that supports the format cannot have. What is added is recorded, because lowering takes longer than the rest of a
    fetch whose modules are compiled.
    """
    spec = entry.spec
    if entry.dispatch is not None or not entry.timings or not isinstance(spec, KernelSpec):
        return entry
    launches = [[launch.workload.key, launch.backend, dict(launch.params)] for launch in entry.launches]
    works = [[work.key, work.weight] for work in spec.workloads]
    registers = [vector_bits(), vector_registers()] if entry.arch == "cpu" else []  # what the CPU's defaults and sources depend on
    source = canonical_json([spec.format_id, entry.arch, registers, works, dict(entry.layout), launches])
    beside = recall(Beside, source)
    if beside is None:
        beside = _beside(spec, entry)
        record(beside, source, beside.to_json())
    return entry if beside.table is None else replace(entry, codes={**beside.codes, **entry.codes}, dispatch=beside.table)


def _beside(spec: KernelSpec, entry: Entry) -> Beside:
    """The defaults beside a tuned entry."""
    target = entry.arch
    backend, _ = backends.first_for(spec, target)
    if backend is None:
        return Beside()
    defaults = defaults_of(backend, spec, target)
    if defaults.plain.layout != entry.layout:
        return Beside()
    own = {launch.workload.key for launch in entry.launches}
    grid = {key: schedule for key, schedule in defaults.grid.items() if key not in own}
    order = [entry.schedule(launch) for launch in entry.launches]
    further = [schedule for schedule in dict.fromkeys([*grid.values(), defaults.plain]) if schedule not in order]
    codes: dict[str, Code] = {}
    launches: list[Launch] = []
    for schedule in further:
        code = Code.of(backend.lower(spec, schedule, target))
        codes.setdefault(code.file, code)
        launches.append(Launch(_home(schedule, grid, spec), schedule.backend, schedule.launch, code.file))
    waves = {schedule: backend.waves(spec, schedule, target) for schedule in order if schedule.backend == backend.name}
    table = _table(grid, defaults.plain, [*order, *further], {**defaults.waves, **waves})
    return Beside(codes, replace(table, launches=tuple(launches)))


def untuned_entry(
    spec: AnySpec,
    target: Target,
    defaults: Defaults,
    code: Mapping[Schedule, tuple[Source, Artifact | None]],
    **facts: Any,
) -> Entry:
    """An entry of the default schedules of the spec's workloads and of the grid's, for calls near them, and of the plain one, for all
    others. `code` has all of them, `facts` are those of `Entry.of`.
    """
    plain, grid = defaults.plain, defaults.grid
    order = [defaults.workloads[work.key] for work in spec.workloads]
    launches = [(work, defaults.workloads[work.key], *code[defaults.workloads[work.key]]) for work in spec.workloads]
    if all(default == plain for default in (*order, *grid.values())):
        return Entry.of(spec, target, launches, **facts)
    further = [schedule for schedule in dict.fromkeys([plain, *grid.values()]) if schedule not in order]
    more = [(_home(schedule, grid, spec), schedule, *code[schedule]) for schedule in further]
    return Entry.of(spec, target, launches, more, _table(grid, plain, [*order, *further], defaults.waves), **facts)


def _home(schedule: Schedule, grid: Mapping[str, Schedule], spec: AnySpec) -> AnyWorkload:
    """The smallest workload of the grid that a schedule is the default of; the spec's first one if there is none."""
    return smallest(parse(key) for key, default in grid.items() if default == schedule) or spec.workloads[0]


def _table(
    grid: Mapping[str, Schedule], plain: Schedule, launches: Sequence[Schedule], waves: Mapping[Schedule, Waves | None]
) -> DispatchTable:
    """The table of defaults, given all launches in the order of their indices."""
    index = {schedule: number for number, schedule in reversed(list(enumerate(launches)))}
    defaults = {key: index[schedule] for key, schedule in grid.items()}
    return DispatchTable((), index[plain], tuple(index.values()), (), waves=tuple(map(waves.get, index)), defaults=defaults)
