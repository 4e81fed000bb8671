"""A linear layer beside torch.matmul with the same weights in the spec's dtype, and the read of the packed bytes, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch

from kvgen.api import get_linear_kernel
from kvgen.arch import Target, device_type
from kvgen.measure.inputs import MOST_COPIES, LinearInputs
from kvgen.measure.measurement import TimingPolicy
from kvgen.measure.read_roofline import read_roofline
from kvgen.measure.timer import cold_bytes, timer_for
from kvgen.spec import LinearSpec
from kvgen.verify.linear import LinearWorkloadCheck


def compare(spec: LinearSpec, target: Target, policy: TimingPolicy, rounds: int) -> Iterator[dict[str, Any]]:
    """Records of each workload, in µs per call: the medians of rounds A B C A B C …, weights used in turn beyond the last-level cache.

    kvgen's outputs are verified before. Raises as `get_linear_kernel` does.
    """
    kernel, device = get_linear_kernel(spec), torch.device(device_type(target))
    cold = cold_bytes(device.type)
    for work in spec.workloads:
        variant, inputs = kernel.variant(work.rows), LinearInputs(kernel, work, device)
        LinearWorkloadCheck(variant, work.key, inputs.case).run()
        whole = kernel.dequantize(inputs.case.packed)
        copies = [whole, *(whole.clone() for _ in range(min(MOST_COPIES, -(-cold // whole.nbytes)) - 1))]
        calls = [partial(torch.matmul, inputs.case.x, one.T) for one in copies]
        entrants: dict[str, Callable[[], tuple[float, ...]]] = {
            "kvgen": partial(inputs.time, variant, policy),
            f"torch.matmul, {spec.linear.dtype}": partial(timer_for(device).time, calls, policy),
            "pure read": partial(read_roofline(target).samples, inputs.nbytes, policy),
        }
        samples: dict[str, list[float]] = {name: [] for name in entrants}
        for _ in range(rounds):
            for name, take in entrants.items():
                samples[name].append(median(take()))
        us = {name: median(taken) for name, taken in samples.items()}
        for name, bytes_ in zip(entrants, (inputs.nbytes, whole.nbytes, inputs.nbytes), strict=True):
            yield {"spec": spec.name, "workload": work.key, "provider": name, "us": us[name], "bytes": bytes_, "read_us": us["pure read"]}
