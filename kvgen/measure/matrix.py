"""Candidates of operations on a matrix: verified to the bit over ragged shapes, timed over matrices that are not in a cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

import torch

from kvgen.lower.matrix import ELEMENT_BYTES
from kvgen.measure.allowance import Allowance
from kvgen.measure.device import cold_bytes
from kvgen.measure.job import CheckPolicy, Job, TimingPolicy
from kvgen.measure.matrix_check import MatrixCheck, MatrixWorkloadCheck
from kvgen.measure.power import Power
from kvgen.measure.protocols import Stage
from kvgen.measure.read_roofline import read_roofline
from kvgen.measure.timer import timer_for
from kvgen.runtime.matrix import MatrixVariant
from kvgen.runtime.module import MatrixModule, load_as
from kvgen.spec import MatrixShape, MatrixSpec
from kvgen.verify import matrix as reference

MOST_COPIES = 64
CALLS = ("quantize", "dequantize", "scales")


class MatrixInputs:
    """Matrices of one shape, with their codes and scales, in as many copies as exceed the device's last-level cache.

    `nbytes` is what `quantize` or `dequantize` moves: every element read and written once, as dtype or code, and the scales read.
    """

    def __init__(self, variant: MatrixVariant, shape: MatrixShape, device: torch.device | str, cold: int | None = None) -> None:
        self.shape, self.device, self.power = shape, torch.device(device), Power()
        self.nbytes = call_bytes(variant.spec, shape, variant.spec.operation)
        cold = cold_bytes(self.device.type) if cold is None else cold
        count = max(1, min(MOST_COPIES, -(-cold // self.nbytes)))
        first = reference.uniform(shape.tokens, shape.channels, variant.dtype, self.device)
        self.matrices = [first, *(first.clone() for _ in range(count - 1))]
        scale = reference.scales(first)
        self.scales = [scale, *(scale.clone() for _ in range(count - 1))]
        self.codes = [torch.zeros(first.shape, dtype=torch.int8, device=self.device) for _ in range(count)]
        for code in self.codes:
            for rows in reference.chunks(*first.shape):
                code[rows] = reference.codes(first[rows], scale)
        self.outs = [torch.empty_like(first) for _ in range(count)] if variant.spec.operation == "dequantize" else self.matrices

    @property
    def held_bytes(self) -> int:
        """Bytes of matrices and codes."""
        return sum(x.nbytes for x in {id(x): x for x in (*self.matrices, *self.codes, *self.outs)}.values())

    def time(self, variant: MatrixVariant, policy: TimingPolicy, call: str | None = None) -> tuple[float, ...]:
        """Samples in µs of the spec's operation, or of `call` (one of CALLS). Raises MeasureError."""
        module, call = variant.module, call or variant.spec.operation
        if module.set_threads is not None and policy.threads is not None:
            module.set_threads(policy.threads)
        if call == "dequantize":
            calls = [partial(module.dequantize, *each) for each in zip(self.codes, self.scales, self.outs, strict=True)]
        elif call == "quantize":
            calls = [partial(module.quantize, *each) for each in zip(self.matrices, self.scales, self.codes, strict=True)]
        else:
            calls = [partial(module.scales, *each) for each in zip(self.matrices, self.scales, strict=True)]
        return timer_for(self.device).time(calls, policy)


@dataclass(frozen=True)
class MatrixCandidate:
    """One module, guarded for verification and bare for timing. See `kvgen.measure.protocols.Candidate`."""

    job: Job
    variant: MatrixVariant
    bare: MatrixVariant
    allowance: Allowance

    @property
    def shared_by(self) -> Hashable:
        """The format."""
        return self.variant.spec.format_id

    def inputs(self, workload: MatrixShape, cold: int | None) -> MatrixInputs:
        """Matrices."""
        return MatrixInputs(self.variant, workload, self.job.device, cold)

    def time(self, inputs: MatrixInputs, policy: TimingPolicy) -> tuple[float, ...]:
        """The spec's operation."""
        with self.allowance:
            return inputs.time(self.bare, policy)

    def roofline(self, inputs: MatrixInputs, policy: TimingPolicy) -> tuple[float, ...]:
        """A copy."""
        return read_roofline(self.job.target).copies(inputs.nbytes, policy)

    def verification(self, policy: CheckPolicy) -> MatrixVerification:
        """See `MatrixVerification`."""
        return MatrixVerification(MatrixCheck(self.variant, self.job.device, policy))


@dataclass(frozen=True)
class MatrixVerification:
    """See `kvgen.measure.protocols.Verification`."""

    check: MatrixCheck

    @property
    def accuracy(self) -> dict[str, float]:
        """The largest errors so far."""
        return self.check.accuracy

    def run(self, stage: Stage, settle: Callable[[], None]) -> None:
        """Ragged shapes, strides, ties, constant channels."""
        stage("verify")
        self.check.run()
        settle()

    def at(self, inputs: MatrixInputs) -> MatrixWorkloadCheck:
        """The matrices that are timed."""
        return MatrixWorkloadCheck(self.check, inputs.shape.key, inputs.matrices[0], inputs.codes[0], inputs.outs[0])

    def again(self) -> None:
        """See `MatrixCheck.again`."""
        self.check.again()


def call_bytes(spec: MatrixSpec, shape: MatrixShape, call: str) -> int:
    """Bytes that one of CALLS must move: the matrix, the scales, and unless it is `scales`, the codes."""
    codes = 0 if call == "scales" else 1
    return shape.elements * (ELEMENT_BYTES[spec.matrix.dtype] + codes) + 4 * shape.channels


def load_matrix_candidate(job: Job, spec: MatrixSpec, allowance: Allowance) -> MatrixCandidate:
    """Load a job's module. Raises KvgenError where it cannot be loaded or lacks a function."""
    with allowance:
        module = load_as(job.artifact, MatrixModule)
    return MatrixCandidate(job, MatrixVariant(spec, allowance.guard(module)), MatrixVariant(spec, module), allowance)
