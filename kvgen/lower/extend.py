"""Which specs support extend attention: calls with more query tokens than a kernel is compiled for (`attention.q_len`)."""

from __future__ import annotations

from kvgen.spec import KernelSpec


def extend_refusal(spec: KernelSpec, *, gpu: bool) -> str | None:
    """Why kernels of a GPU, or of the CPU, cannot attend with more query tokens than `attention.q_len`; None if they can.

    The CPU's do it themselves. On a GPU the cache is dequantized for torch's kernels (`kvgen.runtime.extend`).
    """
    attention = spec.attention
    if not gpu:
        return None
    if attention.softcap > 0:
        return f"attention.softcap ({attention.softcap:g}) is unknown to torch's flash attention"
    if attention.window is not None:
        return f"attention.window ({attention.window}) is not built for prompts"
    if attention.sinks:
        return "attention.sinks (a learned logit per head) are unknown to torch's flash attention"
    if attention.dtype == "float32":
        return "attention.dtype is float32, and torch's flash attention takes 16 bits"
    return None
