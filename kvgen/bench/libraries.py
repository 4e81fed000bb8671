"""The libraries that kvgen is compared with: torch and FlashInfer."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvgen.arch import Target
from kvgen.bench.run import Case, Entrant, Provider
from kvgen.errors import ToolchainMissing, UnsupportedError
from kvgen.format.dtypes import DTYPES
from kvgen.measure.inputs import copies_of
from kvgen.spec import KernelSpec
from kvgen.verify.filled import free_bytes

SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
MEMORY_SHARE = 0.4
PAGE = 16
"""Tokens of FlashInfer's pages."""
WORKSPACE_BYTES = 256 << 20


def providers(spec: KernelSpec, target: Target) -> list[Provider]:
    """All of them for a target: on a CPU, torch's fastest form differs by type, version and machine."""
    if target == "cpu":
        return [*(TorchSdpa(dtype, folded) for dtype in SHORT for folded in (False, True))]
    dtype = "bf16" if spec.attention.dtype == "bfloat16" else "fp16"
    torch_kernels = [TorchSdpa(dtype, folded, kernel) for kernel in KERNELS for folded in (False, True)]
    return [*torch_kernels, *(FlashInfer(fp8, tensor_cores) for fp8 in (False, True) for tensor_cores in (True, False))]


class TorchSdpa:
    """`scaled_dot_product_attention` over an unquantized cache: heads shared by `enable_gqa`, or `folded`, where the query heads of a group
    are query rows.
    """

    name = "torch"

    def __init__(self, dtype: str, folded: bool = False, kernel: str | None = None) -> None:
        self.dtype, self.folded, self.kernel = DTYPES[SHORT[dtype]], folded, kernel
        self.backend = "-".join(["sdpa", *([kernel] if kernel else []), dtype, "folded" if folded else "gqa"])

    def prepare(self, case: Case) -> Entrant:
        """See `Provider`."""
        a = case.spec.attention
        refuse = partial(UnsupportedError, f"{self.name} {self.backend}")
        if a.softcap or a.sinks:
            raise refuse("it knows no soft cap and no sinks")
        if a.window is not None and a.window < case.length:
            raise refuse("it knows no sliding window")
        if case.workload.q_len > 1 and self.folded:
            raise refuse("several query tokens that are folded into rows cannot be masked by token")
        nbytes = 2 * case.workload.batch * case.length * a.kv_heads * a.head_dim * self.dtype.itemsize
        room = int(MEMORY_SHARE * free_bytes(case.device) / nbytes)
        if room < 1:
            raise refuse(f"K and V of {nbytes >> 20} MiB do not fit beside the others")
        q, k, v = case.tensors(self.dtype)
        by_heads = [[x.transpose(1, 2).contiguous() for x in (k, v)] for _ in range(min(room, copies_of(nbytes, case.device)))]
        calls = [self._call(case, q, *copy) for copy in by_heads]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # several lines of C++ for each kernel that torch did not take
                calls[0]()
            if case.device.type == "cuda":
                torch.cuda.synchronize()
        except RuntimeError as error:
            raise refuse(str(error).strip().splitlines()[0]) from error
        return Entrant(case.sampler(calls), nbytes, lambda: case.error(calls[0](), q, k, v))

    def _call(self, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
        """A call over k and v [batch, heads, length, head_dim]; its result is [batch, q_len, q_heads, head_dim]."""
        group = case.spec.attention.group
        batch, tokens, q_heads, dim = q.shape
        queries = q.transpose(1, 2).contiguous()
        if self.folded:
            queries = queries.reshape(batch, q_heads // group, group * tokens, dim)
        mask: torch.Tensor | None = None
        if tokens > 1 and self.kernel == "flash":
            mask = causal_lower_right(tokens, case.length)
        elif tokens > 1:
            row = torch.arange(tokens, device=q.device).unsqueeze(1) + case.length - tokens
            mask = torch.arange(case.length, device=q.device) <= row
        attend = partial(sdpa, queries, k, v, attn_mask=mask, enable_gqa=not self.folded and group > 1)

        def run() -> torch.Tensor:
            if self.kernel is None:
                out = attend()
            else:
                with sdpa_kernel([KERNELS[self.kernel]]):
                    out = attend()
            return out.reshape(batch, q_heads, tokens, dim).transpose(1, 2)

        return run


class FlashInfer:
    """BatchDecodeWithPagedKVCacheWrapper, on tensor cores or on CUDA cores. `fp8`: K and V in e4m3, unscaled, as their standard normal
    numbers allow.
    """

    name = "flashinfer"

    def __init__(self, fp8: bool = False, tensor_cores: bool = True) -> None:
        self.fp8, self.tensor_cores = fp8, tensor_cores
        self.backend = f"batch-decode{'-fp8' if fp8 else ''}{'' if tensor_cores else '-cuda-cores'}"

    def prepare(self, case: Case) -> Entrant:
        """See `Provider`."""
        if importlib.util.find_spec("flashinfer") is None:
            raise ToolchainMissing("flashinfer is not installed")
        a, batch = case.spec.attention, case.workload.batch
        if case.workload.q_len > 1 or a.sinks or a.dtype == "float32":
            raise UnsupportedError(self.name, "batched decode takes one query token of a 16-bit type, and no sinks")
        dtype = DTYPES[a.dtype]
        q, *kv = case.tensors(dtype)
        kept = [x.to(torch.float8_e4m3fn if self.fp8 else dtype) for x in kv]
        cache = paged(*kept)
        pages, nbytes = cache.shape[0] // batch, sum(x.nbytes for x in kept)
        whole = partial(torch.arange, dtype=torch.int32, device=case.device)
        wrapper = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=case.device), "NHD", use_tensor_cores=self.tensor_cores
        )
        last = torch.full((batch,), (case.length - 1) % PAGE + 1, dtype=torch.int32, device=case.device)
        wrapper.plan(
            whole(batch + 1) * pages, whole(batch * pages), last, a.q_heads, a.kv_heads, a.head_dim, PAGE, q_data_type=dtype,
            kv_data_type=kept[0].dtype, window_left=(a.window or 0) - 1, logits_soft_cap=a.softcap or None,
        )  # fmt: skip
        copies = [cache, *(cache.clone() for _ in range(copies_of(nbytes, case.device) - 1))]
        calls = [partial(wrapper.run, q[:, 0], copy) for copy in copies]
        return Entrant(case.sampler(calls), nbytes, lambda: case.error(calls[0]().unsqueeze(1), q, *(x.to(dtype) for x in kept)))


def paged(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """K and V [batch, length, heads, head_dim] as [batch * pages, 2, PAGE, heads, head_dim]; a sequence's pages lie side by side."""
    batch, length, heads, dim = k.shape
    pages = -(-length // PAGE)
    out = torch.zeros((batch, pages, 2, PAGE, heads, dim), dtype=k.dtype, device=k.device)
    for place, x in enumerate((k, v)):
        flat = torch.zeros((batch, pages * PAGE, heads, dim), dtype=k.dtype, device=k.device)
        flat[:, :length] = x
        out[:, :, place] = flat.reshape(batch, pages, PAGE, heads, dim)
    return out.flatten(0, 1)
