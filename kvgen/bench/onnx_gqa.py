"""ONNX Runtime's GroupQueryAttention over a cache of 8 or 4 bits on the CPU, where it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Literal

import torch

from kvgen.bench.case import Case
from kvgen.bench.provider import Entrant
from kvgen.errors import UnsupportedError
from kvgen.extras import require
from kvgen.measure.device import cold_bytes
from kvgen.measure.job import TimingPolicy
from kvgen.measure.timer import timer_for
from kvgen.verify.tolerance import relative_l2

DOMAIN = "com.microsoft"
MOST_COPIES = 64
INPUTS = ("query", "key", "value", "past_key", "past_value", "seqlens_k", "total", "", "", "", "", "", "k_scale", "v_scale")
OUTPUTS = ("output", "present_key", "present_value")


class OnnxGqa:
    """Symmetric codes with one scale per channel of a KV head for all tokens, computed from the data; query and output in float32.

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
        k, v = (_Codes(x, self.bits) for x in (case.keys(torch.float32), case.values(torch.float32)))
        nbytes = k.packed.numel() + v.packed.numel()
        copies = max(1, min(MOST_COPIES, -(-cold_bytes("cpu") // nbytes)))
        session = _session(case, self.bits)
        calls = [_call(session, case, k, v) for _ in range(copies)]

        def sample(policy: TimingPolicy) -> tuple[float, ...]:
            return timer_for(case.device).time(calls, policy)

        def error() -> float:
            out = calls[0]().reshape(case.query(torch.float32).shape)[: case.checked]
            return relative_l2(out, case.attend(case.query(torch.float32), k.read_back(), v.read_back()))

        return Entrant(sample, nbytes, error)


class _Codes:
    """K or V [batch, length, heads, head_dim] in codes: `packed` [batch, heads, length, bytes], `scale` [heads * head_dim].

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


def _session(case: Case, bits: int) -> Any:
    """An inference session of one node. Raises UnsupportedError where this release cannot run it."""
    onnx, ort = importlib.import_module("onnx"), importlib.import_module("onnxruntime")
    a, helper = case.spec.attention, onnx.helper
    real, whole = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32
    kept, width = (onnx.TensorProto.INT8, a.head_dim) if bits == 8 else (onnx.TensorProto.UINT8, a.head_dim // 2)
    batch, heads, channels = case.workload.batch, a.kv_heads, a.kv_heads * a.head_dim
    cache, new = (kept, [batch, heads, case.length, width]), (real, [batch, 1, channels])
    query = (real, [batch, 1, a.q_heads * a.head_dim])
    types = {
        "query": query, "key": new, "value": new, "past_key": cache, "past_value": cache, "seqlens_k": (whole, [batch]),
        "total": (whole, [1]), "k_scale": (real, [channels]), "v_scale": (real, [channels]), "output": query, "present_key": cache,
        "present_value": cache,
    }  # fmt: skip
    node = helper.make_node(
        "GroupQueryAttention", INPUTS, OUTPUTS, domain=DOMAIN, num_heads=a.q_heads, kv_num_heads=heads, softcap=float(a.softcap),
        local_window_size=a.window or -1, kv_cache_bit_width=bits, k_quant_type="PER_CHANNEL", v_quant_type="PER_CHANNEL",
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


def _call(session: Any, case: Case, k: _Codes, v: _Codes) -> Callable[[], torch.Tensor]:
    """A call over a cache of its own; past and present share memory, so nothing is copied."""
    ort = importlib.import_module("onnxruntime")
    batch = case.workload.batch
    last = [x.read_back()[:, -1].reshape(batch, 1, -1) for x in (k, v)]
    given = {
        "query": case.query(torch.float32).reshape(batch, 1, -1), "key": last[0], "value": last[1], "past_key": k.packed,
        "past_value": v.packed, "seqlens_k": torch.full((batch,), case.length - 1, dtype=torch.int32),
        "total": torch.tensor([case.length], dtype=torch.int32), "k_scale": k.scale.flatten(), "v_scale": v.scale.flatten(),
    }  # fmt: skip
    values = {name: ort.OrtValue.ortvalue_from_numpy(x.numpy().copy()) for name, x in given.items()}
    out = torch.empty_like(given["query"])
    values["output"] = ort.OrtValue.ortvalue_from_numpy(out.numpy())
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
