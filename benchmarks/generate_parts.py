"""What the kernels of a decode step are for, by their names: `gpu_generate`'s h200_generate_kernels.csv."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

GEMM = re.compile(r"^(?!triton_poi).*(gemm|gemv|nvjet|cutlass|split_?k|triton_tem|_mm_)", re.IGNORECASE)
"""Names of kernels that multiply by weights: cuBLAS's, and those that torch generates. It names pointwise kernels (triton_poi) after
products, too, whose results they read."""
ATTENTION = re.compile(r"attend|plan_kernel|sdpa|fmha|flash|lean_reduction", re.IGNORECASE)
"""In the names of kernels of attention: kvgen's, cuDNN's with the sum of its splits, and flash attention's."""
WAITING = "advance_kernel"
"""In the name of the kernel that advances the lengths: it waits beside the attention before it, and its own work is a microsecond."""
PARTS = ("attention", "weights", "rest")


def part_of(kernel: str) -> str:
    """The part of a step that a kernel belongs to."""
    return "attention" if ATTENTION.search(kernel) else "weights" if GEMM.search(kernel) else "rest"


def parts(kernels: Iterable[Mapping[str, str]]) -> dict[str, float]:
    """Milliseconds of each part of a step, by its kernels; empty where there are none."""
    spent = dict.fromkeys(PARTS, 0.0)
    for row in kernels:
        if WAITING not in row["kernel"]:
            spent[part_of(row["kernel"])] += float(row["ms"])
    return spent if any(spent.values()) else {}
