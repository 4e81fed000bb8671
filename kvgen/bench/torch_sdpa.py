"""torch's scaled_dot_product_attention over an unquantized cache, in all ways that a user could call it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvgen.bench.case import Case
from kvgen.bench.provider import Entrant, Provider
from kvgen.errors import UnsupportedError
from kvgen.measure.device import cold_bytes, free_bytes
from kvgen.measure.job import TimingPolicy
from kvgen.measure.timer import timer_for
from kvgen.verify.tolerance import relative_l2

Form = Literal["gqa", "expanded", "folded"]
FORMS: tuple[Form, ...] = ("gqa", "expanded", "folded")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
MEMORY_SHARE = 0.4
MOST_COPIES = 64


class TorchSdpa:
    """One dtype, one form: `gqa` shares heads with enable_gqa, `expanded` repeats the heads of K and V, `folded` treats the query heads of
    a group as query rows.
    """

    name = "torch"

    def __init__(self, dtype: str, form: Form, kernel: str | None = None) -> None:
        self.dtype, self.form, self.kernel = dtype, form, kernel
        self.backend = "-".join(["sdpa", *([kernel] if kernel else []), dtype, form])

    def prepare(self, case: Case) -> Entrant:
        """See `Provider`."""
        attention, dtype = case.spec.attention, DTYPES[self.dtype]
        reason = self._refusal(case)
        if reason:
            raise UnsupportedError(f"{self.name} {self.backend}", reason)
        heads = attention.q_heads if self.form == "expanded" else attention.kv_heads
        nbytes = 2 * case.workload.batch * case.length * heads * attention.head_dim * dtype.itemsize
        if nbytes > MEMORY_SHARE * free_bytes(case.device):
            raise UnsupportedError(f"{self.name} {self.backend}", f"K and V of {nbytes >> 20} MiB do not fit beside the others")
        room = max(1, int(MEMORY_SHARE * free_bytes(case.device) / nbytes))
        copies = max(1, min(MOST_COPIES, room, -(-cold_bytes(case.device.type) // nbytes)))
        q, held = case.query(dtype), case.by_heads(dtype, heads, copies)
        calls = [self._call(case, q, k, v) for k, v in held]
        self._try(case, calls[0])

        def sample(policy: TimingPolicy) -> tuple[float, ...]:
            return timer_for(case.device).time(calls, policy)

        def error() -> float:
            first = [x[: case.checked] for x in (q, *held[0])]
            return relative_l2(self._call(case, *first)(), case.expected(dtype))

        return Entrant(sample, nbytes, error)

    def _refusal(self, case: Case) -> str | None:
        attention = case.spec.attention
        if attention.softcap or attention.sinks:
            return "it knows no soft cap and no sinks"
        if attention.window is not None and attention.window < case.length:
            return "it knows no sliding window"
        if case.workload.q_len > 1 and self.form == "folded":
            return "several query tokens that are folded into rows cannot be masked by token"
        return None

    def _try(self, case: Case, call: Callable[[], torch.Tensor]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # several lines of C++ for each kernel that torch did not take
                call()
            if case.device.type == "cuda":
                torch.cuda.synchronize()
        except RuntimeError as error:
            raise UnsupportedError(f"{self.name} {self.backend}", str(error).strip().splitlines()[0]) from error

    def _call(self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
        """A call over k and v [batch, heads, length, head_dim]; its result is [batch, q_len, q_heads, head_dim]."""
        group = case.spec.attention.group
        batch, tokens, q_heads, dim = q.shape
        queries = q.transpose(1, 2).contiguous()
        if self.form == "folded":
            queries = queries.reshape(batch, q_heads // group, group * tokens, dim)
        mask: torch.Tensor | None = None
        if tokens > 1 and self.kernel == "flash":
            mask = causal_lower_right(tokens, case.length)
        elif tokens > 1:
            row = torch.arange(tokens, device=q.device).unsqueeze(1) + case.length - tokens
            mask = torch.arange(case.length, device=q.device) <= row
        enable = self.form == "gqa" and group > 1
        kernels = [KERNELS[self.kernel]] if self.kernel else None

        def run() -> torch.Tensor:
            if kernels is None:
                out = sdpa(queries, k, v, attn_mask=mask, enable_gqa=enable)
            else:
                with sdpa_kernel(kernels):
                    out = sdpa(queries, k, v, attn_mask=mask, enable_gqa=enable)
            return out.reshape(batch, q_heads, tokens, dim).transpose(1, 2)

        return run


def cpu_providers() -> list[Provider]:
    """Three types in three forms: on a CPU the fastest differs by type, version and machine."""
    return [TorchSdpa(dtype, form) for dtype in DTYPES for form in FORMS]


def cuda_providers(dtype: str) -> list[Provider]:
    """Each 16-bit kernel with grouped heads, and folded, of the spec's dtype."""
    short = "bf16" if dtype == "bfloat16" else "fp16"
    forms: tuple[Form, ...] = ("gqa", "folded")
    return [TorchSdpa(short, form, kernel) for kernel in KERNELS for form in forms]
