"""The INT8 per-channel paper's experiment: its four kernels, kvgen's own and the CPU over its eight shapes, in one run.

What a call moves is what it must read and write once: `quantize` the matrix, the scales and the codes, `dequantize` the same the other
way, `scales` the matrix. The first two are compared with a copy that moves as many bytes, half of them read and half written; `scales`
with a pure read. A matrix whose scales are not known is therefore read twice: by `scales`, then by `quantize`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from kvgen._machine import cores
from kvgen.api.fetch import get_matrix_kernel
from kvgen.api.matrix import MatrixKernel
from kvgen.arch import Target, device_type
from kvgen.bench.int8_paper import SHAPES
from kvgen.bench.run import too_slow
from kvgen.errors import UnsupportedError
from kvgen.lower.backends import get_backend
from kvgen.lower.matrix import NO_LAYOUT, PAPER_VARIANTS
from kvgen.lower.schedule import Schedule
from kvgen.measure.job import CheckPolicy, TimingPolicy
from kvgen.measure.matrix import CALLS, MatrixInputs, call_bytes
from kvgen.measure.matrix_check import MatrixCheck, MatrixWorkloadCheck
from kvgen.measure.read_roofline import read_roofline
from kvgen.runtime.matrix import MatrixVariant, load_matrix
from kvgen.spec import MatrixShape, MatrixSpec, load_any_spec
from kvgen.toolchain import ArtifactCache
from kvgen.toolchain.pool import build_all
from kvgen.verify import matrix as reference

OURS = "kvgen"
BESIDE: Target = "cpu"
"""What GPUs are compared with."""


@dataclass(frozen=True)
class Entrant:
    """A compiled variant by name: the operation's own where it depends on the call."""

    name: str
    target: Target
    of_call: Mapping[str, MatrixVariant | MatrixKernel]
    threads: int | None = None

    def variant(self, call: str, shape: MatrixShape) -> MatrixVariant:
        """The compiled schedule of a call over a shape."""
        chosen = self.of_call[call]
        return chosen.variant(shape.tokens, shape.channels) if isinstance(chosen, MatrixKernel) else chosen


@dataclass(frozen=True)
class Row:
    """One entrant, shape and call. Times are medians in µs; `roofline_us` is a copy's or (for scales) a read's of the same bytes."""

    shape: str
    tokens: int
    channels: int
    variant: str
    target: Target
    call: str
    us: float
    nbytes: int
    roofline_us: float

    @property
    def fraction(self) -> float:
        """Share of the roofline's speed."""
        return self.roofline_us / self.us


@dataclass(frozen=True)
class ShapeErrors:
    """The paper's metrics of one shape; equal for every entrant, because all codes are."""

    shape: str
    errors: reference.Errors


@dataclass
class _Series:
    entrant: Entrant
    call: str
    samples: list[float] = field(default_factory=list)
    spent: float = 0.0


def spec_of(operation: str, target: Target) -> MatrixSpec:
    """The paper's format: float32, with its eight shapes."""
    shapes = [{"tokens": tokens, "channels": channels} for _, tokens, channels in SHAPES]
    spec = load_any_spec({"name": f"int8-{operation}", "operation": operation, "arch": target, "workloads": shapes})
    assert isinstance(spec, MatrixSpec)
    return spec


def paper_entrants(target: Target) -> Iterator[Entrant]:
    """The paper's four kernels as schedules of the CUDA back end. Raises ToolchainMissing, CompileError."""
    spec, backend = spec_of("quantize", target), get_backend("cuda")
    sources = {name: backend.lower(spec, Schedule("cuda", NO_LAYOUT, launch), target) for name, launch in PAPER_VARIANTS.items()}
    built = build_all(sources.values(), ArtifactCache(), lambda _: None)
    for name, source in sources.items():
        variant = load_matrix(spec, built[source.id].path)
        yield Entrant(name, target, dict.fromkeys(CALLS, variant))


def fetched_entrants(target: Target) -> Iterator[Entrant]:
    """kvgen's kernels of both operations as `get_matrix_kernel` returns them; on a CPU by one thread and by all."""
    kernels = {name: get_matrix_kernel(spec_of(name, target)) for name in ("quantize", "dequantize")}
    for threads in dict.fromkeys((1, cores()) if target == "cpu" else (None,)):
        name = OURS if threads is None else f"{OURS}, {threads} thread{'s' if threads > 1 else ''}"
        yield Entrant(name, target, {call: kernels["dequantize" if call == "dequantize" else "quantize"] for call in CALLS}, threads)


def run(
    entrants: Sequence[Entrant],
    shapes: Iterable[tuple[str, MatrixShape]],
    policy: TimingPolicy,
    rounds: int,
    told: Callable[[str], None] = lambda _: None,
    kept: Callable[[Sequence[Row]], None] = lambda _: None,
) -> tuple[list[Row], list[ShapeErrors]]:
    """Verify and time all entrants A B C A B C … at every shape. `told` is called with the reason where a shape does not fit, `kept`
    with the rows of every shape and target once they are measured.
    """
    rows: list[Row] = []
    found: list[ShapeErrors] = []
    for name, shape in shapes:
        for number, target in enumerate(dict.fromkeys(entrant.target for entrant in entrants)):
            here = [entrant for entrant in entrants if entrant.target == target]
            try:
                at_shape, errors = _at_shape(here, name, shape, target, policy, rounds)
            except UnsupportedError as error:
                told(f"{shape.key} on {target}: {error.reason}")
                continue
            kept(at_shape)
            rows += at_shape
            found += [] if number else [ShapeErrors(shape.key, errors)]
    return rows, found


def _at_shape(
    entrants: Sequence[Entrant], name: str, shape: MatrixShape, target: Target, policy: TimingPolicy, rounds: int
) -> tuple[list[Row], reference.Errors]:
    spec = spec_of("dequantize", target)  # its inputs have room for what is read back
    _require_room(spec, shape, target)
    first = entrants[0].variant("quantize", shape)
    inputs = MatrixInputs(MatrixVariant(spec, first.module), shape, device_type(target), policy.cold_bytes)
    for entrant in entrants:
        for variant in {id(v): v for v in (entrant.variant(call, shape) for call in CALLS)}.values():
            check = MatrixCheck(variant, device_type(target), CheckPolicy())
            MatrixWorkloadCheck(check, shape.key, inputs.matrices[0], inputs.codes[0], inputs.outs[0]).run()
    errors = reference.errors(inputs.matrices[0], first.dequantize(inputs.codes[0], inputs.scales[0], inputs.outs[0]))
    series = [_Series(entrant, call) for entrant in entrants for call in CALLS]
    rooflines: dict[str, list[float]] = {call: [] for call in CALLS}
    for number in range(rounds):
        for one in series:
            if too_slow(number, one.spent, policy):
                continue
            began = time.monotonic()
            chosen = replace(policy, threads=one.entrant.threads)
            one.samples.append(median(inputs.time(one.entrant.variant(one.call, shape), chosen, one.call)))
            one.spent += time.monotonic() - began
        for call in CALLS if number < 3 else ():
            moved, roofline = call_bytes(spec, shape, call), read_roofline(target)
            rooflines[call].append(median((roofline.samples if call == "scales" else roofline.copies)(moved, policy)))
    made = [
        Row(
            name, shape.tokens, shape.channels, one.entrant.name, target, one.call,
            median(one.samples), call_bytes(spec, shape, one.call), median(rooflines[one.call]),
        )
        for one in series
    ]  # fmt: skip
    return made, errors


def _require_room(spec: MatrixSpec, shape: MatrixShape, target: Target) -> None:
    """Raises UnsupportedError where the matrix, what is read back, codes and the copy's buffers do not fit the free memory."""
    import torch

    from kvgen.measure.device import free_bytes

    need = 4 * call_bytes(spec, shape, "quantize")
    free = free_bytes(torch.device(device_type(target)))
    if need > free:
        raise UnsupportedError("cpu" if target == "cpu" else "cuda", f"it takes {need >> 20} MiB, and {free >> 20} MiB are free")
