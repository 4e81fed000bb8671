"""The libraries that kvgen is compared with: torch, FlashInfer and ONNX Runtime."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvgen.arch import Target
from kvgen.bench.run import Case, Entrant, Provider
from kvgen.errors import ToolchainMissing, UnsupportedError
from kvgen.extras import require
from kvgen.spec import KernelSpec
from kvgen.verify.filled import free_bytes
from kvgen.verify.quantize import DTYPES

SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
MEMORY_SHARE = 0.4
PAGE = 16
"""Tokens of FlashInfer's pages."""
WORKSPACE_BYTES = 256 << 20
DOMAIN = "com.microsoft"
INPUTS = ("query", "key", "value", "past_key", "past_value", "seqlens_k", "total", "", "", "", "", "", "k_scale", "v_scale")
OUTPUTS = ("output", "present_key", "present_value")


def providers(spec: KernelSpec, target: Target) -> list[Provider]:
    """All of them for a target: on a CPU, torch's fastest form differs by type, version and machine."""
    if target == "cpu":
        return [*(TorchSdpa(dtype, folded) for dtype in SHORT for folded in (False, True)), OnnxGqa(8), OnnxGqa(4)]
    dtype = "bf16" if spec.attention.dtype == "bfloat16" else "fp16"
    torch_kernels = [TorchSdpa(dtype, folded, kernel) for kernel in KERNELS for folded in (False, True)]
    return [*torch_kernels, FlashInfer(), FlashInfer(fp8=True)]


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
        by_heads = [[x.transpose(1, 2).contiguous() for x in (k, v)] for _ in range(min(room, case.copies(nbytes)))]
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
    """BatchDecodeWithPagedKVCacheWrapper on tensor cores. `fp8`: K and V in e4m3, unscaled, as their standard normal numbers allow."""

    name = "flashinfer"

    def __init__(self, fp8: bool = False) -> None:
        self.fp8 = fp8
        self.backend = f"batch-decode{'-fp8' if fp8 else ''}"

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
            torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=case.device), "NHD", use_tensor_cores=True
        )
        last = torch.full((batch,), (case.length - 1) % PAGE + 1, dtype=torch.int32, device=case.device)
        wrapper.plan(
            whole(batch + 1) * pages, whole(batch * pages), last, a.q_heads, a.kv_heads, a.head_dim, PAGE, q_data_type=dtype,
            kv_data_type=kept[0].dtype, window_left=(a.window or 0) - 1, logits_soft_cap=a.softcap or None,
        )  # fmt: skip
        copies = [cache, *(cache.clone() for _ in range(case.copies(nbytes) - 1))]
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


class OnnxGqa:
    """GroupQueryAttention: symmetric codes with one scale per channel of a KV head for all tokens; query and output in float32.

    The operator appends its token to the cache: a call reads all tokens but one, appends that one and attends.
    """

    name = "onnxruntime"

    def __init__(self, bits: Literal[8, 4]) -> None:
        self.bits = bits
        self.backend = f"gqa-int{bits}"

    def prepare(self, case: Case) -> Entrant:
        """See `Provider`."""
        require("the comparison with ONNX Runtime", "onnxruntime", "onnx")
        if case.workload.q_len > 1 or case.spec.attention.sinks or case.spec.attention.head_dim % 2:
            raise UnsupportedError(f"{self.name} {self.backend}", "rows are for one query token, without sinks, and an even head_dim")
        q, *kv = case.tensors(torch.float32)
        k, v = (Codes(x, self.bits) for x in kv)
        nbytes = k.packed.numel() + v.packed.numel()
        session = self._session(case)
        calls = [self._call(session, case, k, v) for _ in range(case.copies(nbytes))]
        return Entrant(case.sampler(calls), nbytes, lambda: case.error(calls[0]().reshape(q.shape), q, k.read_back(), v.read_back()))

    def _session(self, case: Case) -> Any:
        """An inference session of one node. Raises UnsupportedError where this release cannot run it."""
        onnx, ort = importlib.import_module("onnx"), importlib.import_module("onnxruntime")
        a, helper, kinds = case.spec.attention, onnx.helper, onnx.TensorProto
        kept, width = (kinds.INT8, a.head_dim) if self.bits == 8 else (kinds.UINT8, a.head_dim // 2)
        batch, heads, channels = case.workload.batch, a.kv_heads, a.kv_heads * a.head_dim
        cache, new, scale = (kept, [batch, heads, case.length, width]), (kinds.FLOAT, [batch, 1, channels]), (kinds.FLOAT, [channels])
        query = (kinds.FLOAT, [batch, 1, a.q_heads * a.head_dim])
        types = {
            "query": query, "key": new, "value": new, "past_key": cache, "past_value": cache, "seqlens_k": (kinds.INT32, [batch]),
            "total": (kinds.INT32, [1]), "k_scale": scale, "v_scale": scale, "output": query, "present_key": cache, "present_value": cache,
        }  # fmt: skip
        node = helper.make_node(
            "GroupQueryAttention", INPUTS, OUTPUTS, domain=DOMAIN, num_heads=a.q_heads, kv_num_heads=heads, softcap=float(a.softcap),
            local_window_size=a.window or -1, kv_cache_bit_width=self.bits, k_quant_type="PER_CHANNEL", v_quant_type="PER_CHANNEL",
        )  # fmt: skip
        described = {name: helper.make_tensor_value_info(name, *types[name]) for name in types}
        graph = helper.make_graph([node], "gqa", [described[n] for n in INPUTS if n], [described[n] for n in OUTPUTS])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)], ir_version=10)
        options = ort.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 4
        try:
            return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise UnsupportedError(f"onnxruntime {ort.__version__}", str(error).strip().splitlines()[0]) from error

    @staticmethod
    def _call(session: Any, case: Case, k: Codes, v: Codes) -> Callable[[], torch.Tensor]:
        """A call over a cache of its own; past and present share memory, so nothing is copied."""
        ort, batch = importlib.import_module("onnxruntime"), case.workload.batch
        query = case.tensors(torch.float32)[0].reshape(batch, 1, -1)
        last = [x.read_back()[:, -1].reshape(batch, 1, -1) for x in (k, v)]
        given = {
            "query": query, "key": last[0], "value": last[1], "past_key": k.packed, "past_value": v.packed,
            "seqlens_k": torch.full((batch,), case.length - 1, dtype=torch.int32), "total": torch.tensor([case.length], dtype=torch.int32),
            "k_scale": k.scale.flatten(), "v_scale": v.scale.flatten(),
        }  # fmt: skip
        values = {name: ort.OrtValue.ortvalue_from_numpy(x.numpy().copy()) for name, x in given.items()}
        values["output"] = ort.OrtValue.ortvalue_from_numpy(torch.empty_like(query).numpy())
        values |= {f"present_{which}": values[f"past_{which}"] for which in ("key", "value")}
        binding = session.io_binding()
        for name in given:
            binding.bind_ortvalue_input(name, values[name])
        for name in OUTPUTS:
            binding.bind_ortvalue_output(name, values[name])

        def run() -> torch.Tensor:
            session.run_with_iobinding(binding)
            return torch.from_numpy(values["output"].numpy())

        return run


class Codes:
    """K or V [batch, length, heads, head_dim] in codes: `packed` [batch, heads, length, bytes], `scale` [heads, head_dim].

    Codes of 4 bits are stored with 8 added, the even channel in the low half of a byte.
    """

    def __init__(self, x: torch.Tensor, bits: int) -> None:
        top = (1 << (bits - 1)) - 1
        self.scale = (x.abs().amax(dim=(0, 1)) / top).clamp(min=1e-12)
        self.codes = (x / self.scale).round().clamp(-top, top).to(torch.int8)
        by_heads = self.codes.transpose(1, 2).contiguous()
        pairs = (by_heads + 8).to(torch.uint8)
        self.packed = by_heads if bits == 8 else pairs[..., ::2] | pairs[..., 1::2] << 4

    def read_back(self) -> torch.Tensor:
        """What the codes stand for, float32 [batch, length, heads, head_dim]."""
        return self.codes * self.scale
