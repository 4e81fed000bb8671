"""FlashInfer's batched decode over a paged cache of 16 bits or of fp8, where it is installed."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from kvgen.bench.case import Case
from kvgen.bench.provider import Entrant
from kvgen.errors import ToolchainMissing, UnsupportedError
from kvgen.measure.device import cold_bytes
from kvgen.measure.job import TimingPolicy
from kvgen.measure.timer import timer_for
from kvgen.verify.quantize import DTYPES
from kvgen.verify.tolerance import relative_l2

PAGE = 16
WORKSPACE_BYTES = 256 << 20
MOST_COPIES = 64


class FlashInfer:
    """BatchDecodeWithPagedKVCacheWrapper on tensor cores. `fp8`: K and V in e4m3, unscaled, as their standard normal numbers allow."""

    name = "flashinfer"

    def __init__(self, fp8: bool = False) -> None:
        self.fp8 = fp8
        self.backend = f"batch-decode{'-fp8' if fp8 else ''}"

    def prepare(self, case: Case) -> Entrant:
        """See `Provider`."""
        if importlib.util.find_spec("flashinfer") is None:
            raise ToolchainMissing("flashinfer is not installed")
        attention = case.spec.attention
        if case.workload.q_len > 1 or attention.sinks or attention.dtype == "float32":
            raise UnsupportedError(self.name, "batched decode takes one query token of a 16-bit type, and no sinks")
        flashinfer = importlib.import_module("flashinfer")

        batch, dtype = case.workload.batch, DTYPES[attention.dtype]
        kept = torch.float8_e4m3fn if self.fp8 else dtype
        q = case.query(dtype)[:, 0]
        k, v = (x.to(kept) for x in (case.keys(dtype), case.values(dtype)))
        cache = _paged(k, v)
        pages = cache.shape[0] // batch
        nbytes = 2 * k.numel() * kept.itemsize
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=case.device), "NHD", use_tensor_cores=True
        )
        counts = torch.arange(batch + 1, dtype=torch.int32, device=case.device) * pages
        last = torch.full((batch,), (case.length - 1) % PAGE + 1, dtype=torch.int32, device=case.device)
        wrapper.plan(
            counts, torch.arange(batch * pages, dtype=torch.int32, device=case.device), last, attention.q_heads, attention.kv_heads,
            attention.head_dim, PAGE, q_data_type=dtype, kv_data_type=kept, window_left=(attention.window or 0) - 1,
            logits_soft_cap=attention.softcap or None,
        )  # fmt: skip
        copies = [cache]
        while len(copies) < min(MOST_COPIES, -(-cold_bytes("cuda") // nbytes)):
            copies.append(copies[0].clone())

        def sample(policy: TimingPolicy) -> tuple[float, ...]:
            return timer_for(case.device).time([lambda c=c: wrapper.run(q, c) for c in copies], policy)  # type: ignore[misc]

        def error() -> float:
            out = wrapper.run(q, copies[0])[: case.checked].unsqueeze(1)
            return relative_l2(out, case.attend(case.query(dtype), k.to(dtype), v.to(dtype)))

        return Entrant(sample, nbytes, error)


def _paged(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """K and V [batch, length, heads, head_dim] as [batch * pages, 2, PAGE, heads, head_dim]; a sequence's pages lie side by side."""
    batch, length, heads, dim = k.shape
    pages = -(-length // PAGE)
    paged = torch.zeros((batch, pages, 2, PAGE, heads, dim), dtype=k.dtype, device=k.device)
    for place, x in enumerate((k, v)):
        flat = torch.zeros((batch, pages * PAGE, heads, dim), dtype=k.dtype, device=k.device)
        flat[:, :length] = x
        paged[:, :, place] = flat.reshape(batch, pages, PAGE, heads, dim)
    return paged.flatten(0, 1)
