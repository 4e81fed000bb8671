"""Which specs support extend attention: calls with more query tokens than a kernel is compiled for (`attention.q_len`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgen.lower.modifier import modifier_of

if TYPE_CHECKING:
    from kvgen.spec import KernelSpec


def extend_refusal(spec: KernelSpec, *, gpu: bool) -> str | None:
    """Why kernels of a GPU, or of the CPU, cannot attend with more query tokens than `attention.q_len`; None if they can.

    The CPU's do it themselves. On a GPU the cache is dequantized for torch's kernels (`kvgen.runtime.extend`).
    """
    if gpu and spec.attention.dtype == "float32":
        return "attention.dtype is float32, and torch's flash attention takes 16 bits"
    modifier = modifier_of(spec.attention)
    if gpu and not modifier.extends:
        return f"torch's attention kernels do not modify scores by {modifier.header}"
    return None
