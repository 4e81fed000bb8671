"""The INT8 per-channel paper's experiment: its four kernels, kvgen's own and the CPU over its eight shapes, in one run.

What a call moves is what it must read and write once: `quantize` the matrix, the scales and the codes, `dequantize` the same the other
way, `scales` the matrix. The first two are compared with a copy that moves as many bytes, half of them read and half written; `scales`
with a pure read. A matrix whose scales are not known is therefore read twice: by `scales`, then by `quantize`.

The paper is Taneja and Shingvi, December 2025, on a Tesla T4 and two Xeon Gold 6148.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from kvgen._machine import cores
from kvgen.api import get_matrix_kernel
from kvgen.arch import Target, device_type
from kvgen.bench.run import Record, Series, take_turns
from kvgen.errors import UnsupportedError
from kvgen.lower.backend import get_backend
from kvgen.lower.matrix import NO_LAYOUT, PAPER_VARIANTS
from kvgen.lower.schedule import Schedule
from kvgen.measure.inputs import CALLS, MatrixInputs, call_bytes
from kvgen.measure.measurement import TimingPolicy
from kvgen.measure.read_roofline import read_roofline
from kvgen.runtime.matrix import MatrixVariant, load_matrix
from kvgen.spec import MatrixShape, MatrixSpec, load_any_spec
from kvgen.toolchain import ArtifactCache
from kvgen.toolchain.compile import build_all
from kvgen.verify.filled import free_bytes
from kvgen.verify.matrix import MatrixWorkloadCheck, errors

OURS = "kvgen"
BESIDE: Target = "cpu"
"""What GPUs are compared with."""
SHAPES = {
    "small": (2048, 128),
    "medium": (16384, 256),
    "large": (65536, 256),
    "very large": (131072, 256),
    "realistic small": (131072, 1024),
    "realistic medium": (131072, 2048),
    "realistic large": (131072, 4096),
    "realistic very large": (131072, 8192),
}
"""The paper's, by name: tokens and channels (table 3)."""


@dataclass(frozen=True, eq=False)
class Entrant:
    """A compiled variant by name: `variant` gives the one for a call over a shape."""

    name: str
    target: Target
    variant: Callable[[str, MatrixShape], MatrixVariant]
    threads: int | None = None


def spec_of(operation: str, target: Target) -> MatrixSpec:
    """The paper's format: float32, with its eight shapes."""
    shapes = [{"tokens": tokens, "channels": channels} for tokens, channels in SHAPES.values()]
    spec = load_any_spec({"name": f"int8-{operation}", "operation": operation, "arch": target, "workloads": shapes})
    assert isinstance(spec, MatrixSpec)
    return spec


def entrants_for(target: Target) -> Iterator[Entrant]:
    """The paper's kernels on a GPU, as schedules of the CUDA back end; kvgen's, as `get_matrix_kernel` returns them; and the CPU's, by one
    thread and by all. Raises ToolchainMissing, CompileError, and as `get_matrix_kernel` does.
    """
    if target != "cpu":
        spec, backend = spec_of("quantize", target), get_backend("cuda")
        sources = {name: backend.lower(spec, Schedule("cuda", NO_LAYOUT, launch), target) for name, launch in PAPER_VARIANTS.items()}
        built = build_all(sources.values(), ArtifactCache(), lambda _: None)
        for name, source in sources.items():
            variant = load_matrix(spec, built[source.id].path)
            yield Entrant(name, target, lambda *_, variant=variant: variant)
    for one in dict.fromkeys((target, BESIDE)):
        quantize, dequantize = (get_matrix_kernel(spec_of(name, one)) for name in ("quantize", "dequantize"))

        def ours(call: str, shape: MatrixShape, quantize: Any = quantize, dequantize: Any = dequantize) -> MatrixVariant:
            variant: MatrixVariant = (dequantize if call == "dequantize" else quantize).variant(shape.tokens, shape.channels)
            return variant

        for threads in dict.fromkeys((1, cores()) if one == "cpu" else (None,)):
            name = OURS if threads is None else f"{OURS}, {threads} thread{'s' if threads > 1 else ''}"
            yield Entrant(name, one, ours, threads)


def run(
    entrants: Sequence[Entrant],
    shapes: Iterable[MatrixShape],
    policy: TimingPolicy,
    rounds: int,
    told: Callable[[str], None] = lambda _: None,
    kept: Callable[[Sequence[Record]], None] = lambda _: None,
) -> tuple[list[Record], list[Record]]:
    """Verify and time all entrants A B C A B C … at every shape: records, and the paper's three errors by shape, equal for every entrant.

    `told` is called with the reason where a shape does not fit, `kept` with all records so far after every shape and target.
    """
    records: list[Record] = []
    found: dict[str, Record] = {}
    for shape in shapes:
        for target in dict.fromkeys(entrant.target for entrant in entrants):
            here = [entrant for entrant in entrants if entrant.target == target]
            try:
                new, of_shape = _at_shape(here, shape, target, policy, rounds)
            except UnsupportedError as error:
                told(f"{shape.key} on {target}: {error.reason}")
                continue
            records += new
            kept(records)
            found.setdefault(shape.key, {"shape": shape.key, **of_shape})
    return records, list(found.values())


def _at_shape(
    entrants: Sequence[Entrant], shape: MatrixShape, target: Target, policy: TimingPolicy, rounds: int
) -> tuple[list[Record], Record]:
    spec, device = spec_of("dequantize", target), device_type(target)  # its inputs have room for what is read back
    need, free = 4 * call_bytes(spec, shape, "quantize"), free_bytes(torch.device(device))
    if need > free:  # matrix, codes, what is read back, the copy's buffers
        raise UnsupportedError(device, f"it takes {need >> 20} MiB, and {free >> 20} MiB are free")
    first = entrants[0].variant("quantize", shape)
    inputs = MatrixInputs(MatrixVariant(spec, first.module), shape, device, policy.cold_bytes)
    for entrant in entrants:
        for variant in {v.module.path: v for v in (entrant.variant(call, shape) for call in CALLS)}.values():
            MatrixWorkloadCheck(variant, shape.key, inputs.matrices[0], inputs.codes[0], inputs.outs[0]).run()
    of_shape = errors(inputs.matrices[0], first.dequantize(inputs.codes[0], inputs.scales[0], inputs.outs[0]))
    rooflines = read_roofline(target)

    def series_of(entrant: Entrant, call: str) -> Series:
        variant, nbytes = entrant.variant(call, shape), call_bytes(spec, shape, call)
        read = rooflines.samples if call == "scales" else rooflines.copies
        return Series(
            lambda policy: inputs.time(variant, replace(policy, threads=entrant.threads), call),
            (lambda policy: median(read(nbytes, policy))) if entrant is entrants[0] else None,
        )

    series = {(entrant, call): series_of(entrant, call) for entrant in entrants for call in CALLS}
    take_turns(list(series.values()), target, policy, rounds)
    name = next((name for name, size in SHAPES.items() if size == (shape.tokens, shape.channels)), "")
    records = []
    for (entrant, call), one in series.items():
        us, roofline_us = median(one.medians), median(series[entrants[0], call].reads)
        records.append({
            "shape": name, "tokens": shape.tokens, "channels": shape.channels, "variant": entrant.name, "target": target, "call": call,
            "us": round(us, 3), "nbytes": call_bytes(spec, shape, call), "roofline_us": round(roofline_us, 3),
            "fraction": round(roofline_us / us, 4),
        })  # fmt: skip
    return records, asdict(of_shape)
