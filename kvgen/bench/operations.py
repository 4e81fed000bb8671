"""Linear layers beside torch.matmul and the read of the packed bytes; operations on a matrix beside the INT8 per-channel paper's kernels
and a copy. All take turns, A B C A B C …, over inputs used in turn beyond the last-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch

from kvgen.api import get_linear_kernel, get_matrix_kernel
from kvgen.arch import Target, device_type
from kvgen.lower.backend import get_backend
from kvgen.lower.matrix import PAPER_VARIANTS
from kvgen.lower.operation import NO_LAYOUT
from kvgen.lower.schedule import Schedule
from kvgen.measure.inputs import LinearInputs, MatrixInputs, copies_of
from kvgen.measure.measurement import TimingPolicy
from kvgen.measure.read_roofline import read_roofline
from kvgen.measure.timer import timer_for
from kvgen.runtime.matrix import load_matrix
from kvgen.spec import LinearShape, LinearSpec, MatrixShape, MatrixSpec
from kvgen.toolchain import ArtifactCache
from kvgen.toolchain.compile import build_all
from kvgen.verify.linear import LinearWorkloadCheck
from kvgen.verify.matrix import MatrixWorkloadCheck

Entrants = dict[str, tuple[Callable[[], tuple[float, ...]], int]]
"""By name, what gives a round's samples in µs, and the bytes that it must move. The last is what the others are compared with."""


def compare(spec: LinearSpec | MatrixSpec, target: Target, policy: TimingPolicy, rounds: int) -> Iterator[dict[str, Any]]:
    """Records of each workload, in µs per call: the medians of rounds. Kernels are verified before.

    Raises as `get_linear_kernel` and `get_matrix_kernel` do.
    """
    entrants_at = _linear(spec, target, policy) if isinstance(spec, LinearSpec) else _matrix(spec, target, policy)
    for work in spec.workloads:
        yield from _records({"spec": spec.name, "workload": work.key}, entrants_at(work), rounds)


def _records(about: dict[str, Any], entrants: Entrants, rounds: int) -> Iterator[dict[str, Any]]:
    """Those of a workload, whose inputs are freed before the next one's are made."""
    samples: dict[str, list[float]] = {name: [] for name in entrants}
    for _ in range(rounds):
        for name, (take, _) in entrants.items():
            samples[name].append(median(take()))
    us = {name: median(taken) for name, taken in samples.items()}
    read_us = us[[*us][-1]]
    for name, (_, nbytes) in entrants.items():
        yield {**about, "provider": name, "us": us[name], "bytes": nbytes, "read_us": read_us}


def _linear(spec: LinearSpec, target: Target, policy: TimingPolicy) -> Callable[[Any], Entrants]:
    kernel, device = get_linear_kernel(spec), torch.device(device_type(target))

    def at(work: LinearShape) -> Entrants:
        variant, inputs = kernel.variant(work.rows), LinearInputs(kernel, work, device)
        LinearWorkloadCheck(variant, work.key, inputs.case).run()
        whole = kernel.dequantize(inputs.case.packed)
        copies = [whole, *(whole.clone() for _ in range(copies_of(whole.nbytes, device) - 1))]
        calls = [partial(torch.matmul, inputs.case.x, one.T) for one in copies]
        return {
            "kvgen": (partial(inputs.time, variant, policy), inputs.nbytes),
            f"torch.matmul, {spec.linear.dtype}": (partial(timer_for(device).time, calls, policy), whole.nbytes),
            "pure read": (partial(read_roofline(target).samples, inputs.nbytes, policy), inputs.nbytes),
        }

    return at


def _matrix(spec: MatrixSpec, target: Target, policy: TimingPolicy) -> Callable[[Any], Entrants]:
    kernel, papers = get_matrix_kernel(spec), {}
    if target != "cpu":
        backend = get_backend("cuda")
        sources = {name: backend.lower(spec, Schedule("cuda", NO_LAYOUT, launch), target) for name, launch in PAPER_VARIANTS.items()}
        built = build_all(sources.values(), ArtifactCache(), lambda _: None)
        papers = {name: load_matrix(spec, built[source.id].path) for name, source in sources.items()}

    def at(work: MatrixShape) -> Entrants:
        variants = {**papers, "kvgen": kernel.variant(work.tokens, work.channels)}
        inputs = MatrixInputs(variants["kvgen"], work, device_type(target), policy.cold_bytes)
        for variant in variants.values():
            MatrixWorkloadCheck(variant, work.key, inputs.matrices[0], inputs.codes[0], inputs.outs[0]).run()
        entrants: Entrants = {name: (partial(inputs.time, one, policy), inputs.nbytes) for name, one in variants.items()}
        return {**entrants, "copy": (partial(read_roofline(target).copies, inputs.nbytes, policy), inputs.nbytes)}

    return at
