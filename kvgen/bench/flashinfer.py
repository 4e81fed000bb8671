"""FlashInfer's batched decode over an unquantized paged cache, where it is installed."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from kvgen.bench.case import Case
from kvgen.bench.provider import Entrant
from kvgen.errors import UnsupportedError
from kvgen.measure.device import cold_bytes
from kvgen.measure.job import TimingPolicy
from kvgen.measure.timer import timer_for
from kvgen.reference.tolerance import relative_l2
from kvgen.toolchain.launch import DTYPES

PAGE = 16
WORKSPACE_BYTES = 256 << 20
MOST_COPIES = 64


class FlashInfer:
    """BatchDecodeWithPagedKVCacheWrapper on tensor cores."""

    name = "flashinfer"
    backend = "batch-decode"

    def prepare(self, case: Case) -> Entrant:
        """See `Provider`."""
        if importlib.util.find_spec("flashinfer") is None:
            raise UnsupportedError(self.name, "it is not installed")
        attention = case.spec.attention
        if case.workload.q_len > 1 or attention.sinks or attention.dtype == "float32":
            raise UnsupportedError(self.name, "batched decode takes one query token of a 16-bit type, and no sinks")
        flashinfer = importlib.import_module("flashinfer")

        batch, dtype = case.workload.batch, DTYPES[attention.dtype]
        pages = -(-case.length // PAGE)
        q = case.query(dtype)[:, 0]
        k, v = case.keys(dtype), case.values(dtype)
        paged = torch.zeros((batch, pages, 2, PAGE, attention.kv_heads, attention.head_dim), dtype=dtype, device=case.device)
        for place, x in enumerate((k, v)):
            flat = torch.zeros((batch, pages * PAGE, *x.shape[2:]), dtype=dtype, device=case.device)
            flat[:, : case.length] = x
            paged[:, :, place] = flat.reshape(batch, pages, PAGE, *x.shape[2:])
        nbytes = 2 * k.numel() * dtype.itemsize
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=case.device), "NHD", use_tensor_cores=True
        )
        counts = torch.arange(batch + 1, dtype=torch.int32, device=case.device) * pages
        last = torch.full((batch,), (case.length - 1) % PAGE + 1, dtype=torch.int32, device=case.device)
        wrapper.plan(
            counts, torch.arange(batch * pages, dtype=torch.int32, device=case.device), last, attention.q_heads, attention.kv_heads,
            attention.head_dim, PAGE, q_data_type=dtype, kv_data_type=dtype, window_left=(attention.window or 0) - 1,
            logits_soft_cap=attention.softcap or None,
        )  # fmt: skip
        copies = [paged.flatten(0, 1)]
        while len(copies) < min(MOST_COPIES, -(-cold_bytes("cuda") // nbytes)):
            copies.append(copies[0].clone())

        def sample(policy: TimingPolicy) -> tuple[float, ...]:
            return timer_for(case.device).time([lambda c=c: wrapper.run(q, c) for c in copies], policy)  # type: ignore[misc]

        def error() -> float:
            out = wrapper.run(q, copies[0])[: case.checked].unsqueeze(1)
            return relative_l2(out, case.expected(dtype))

        return Entrant(sample, nbytes, error)
