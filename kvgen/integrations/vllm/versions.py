"""What differs among releases of vLLM (0.26 to 0.33), its platforms and its two model runners. Nothing else here asks for a version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvgen.integrations.vllm.formats import DTYPE, Layer, refused
from kvgen.integrations.vllm.slots import RequestSlots
from kvgen.runtime.extend import FLASH_CHANNELS
from kvgen.runtime.varlen import Flash, Partial
from kvgen.spec.presets import FORMATS

WRAPPED = "_kvgen"
"""What a function that replaces one of vLLM's is marked by."""
_runner: Any = None
"""The V1 model runner whose step is being prepared; None within its dummy steps, and always with the V2 runner."""
_given_numbers: Any = None
"""The V2 model runner's numbers of a step's requests, in releases whose metadata has none."""


def register(path: str) -> None:
    """Make kvgen's backend the one of `--attention-backend CUSTOM`, also on the CPU, whose platform has one backend alone."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, path)
    if current_platform.is_cpu():
        _wrap(type(current_platform), "get_attn_backend_cls", lambda stock: _choice_on_cpu(stock, AttentionBackendEnum.CUSTOM, path))
    _watch_runners()
    _size_pages()
    _name_presets()


def _wrap(owner: Any, name: str, made: Any) -> None:
    """Replace a function of a class or module by `made(function)`, once."""
    stock = getattr(owner, name, None)
    if stock is None or getattr(stock, WRAPPED, False):
        return
    found = made(stock)
    setattr(getattr(found, "__func__", found), WRAPPED, True)
    setattr(owner, name, found)


def _choice_on_cpu(stock: Any, custom: Any, path: str) -> Any:
    @wraps(stock)
    def get_attn_backend_cls(cls: Any, selected_backend: Any, *args: Any, **more: Any) -> Any:
        return path if selected_backend is custom else stock(selected_backend, *args, **more)

    return classmethod(get_attn_backend_cls)


class _Bytes:
    """What vLLM asks of a type of KV cache: its pages hold bytes, which no kernel of its own reads."""

    name = "kvgen"

    def torch_dtype(self) -> torch.dtype:
        return torch.uint8

    def quant_mode(self) -> Any:
        """NONE: CUSTOM has the number of another mode."""
        from vllm.v1.kv_cache_interface import KVQuantMode

        return KVQuantMode.NONE


def _name_presets() -> None:
    """Let `--kv-cache-dtype` take presets, in releases (0.33) where a plugin may give it names."""
    from vllm.config import cache

    if hasattr(cache, "register_kv_cache_dtype"):
        for name in (DTYPE + preset for preset in FORMATS):
            if not cache.is_known_kv_cache_dtype(name):
                cache.register_kv_cache_dtype(name)(_Bytes)


# --- the size of a page ----------------------------------------------------------------------------------------------------


def sized(spec: Any, cell: int) -> Any:
    """vLLM's spec of a layer whose pages hold `cell` bytes for each token and KV head, instead of K and V in a dtype."""
    return replace(spec, dtype=torch.uint8, state_content_bytes=cell)


def _size_pages() -> None:
    """Releases before `AttentionBackend.customize_spec` let no backend size its pages: the layer's spec is replaced there."""
    from vllm.v1.attention.backend import AttentionBackend

    if hasattr(AttentionBackend, "customize_spec"):
        return
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.v1.kv_cache_interface import FullAttentionSpec, TQFullAttentionSpec

    def made(stock: Any) -> Any:
        @wraps(stock)
        def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
            spec = stock(self, vllm_config)
            cell = getattr(self.attn_backend, "cell_of", None)
            if cell is None or spec is None:
                return spec
            if type(spec) is not FullAttentionSpec:
                raise refused("sliding windows", "this release of vLLM sizes no pages of such layers: take 0.32 or later")
            kept = {f.name: getattr(spec, f.name) for f in fields(spec) if f.init}
            return TQFullAttentionSpec(**{**kept, "dtype": torch.uint8, "tq_slot_size": cell(spec)})

        return get_kv_cache_spec

    _wrap(Attention, "get_kv_cache_spec", made)


def layouts() -> Any:
    """The order of a page's tokens and heads, where a backend states it: [pages, heads, tokens, bytes] for each layer."""
    from vllm.v1.kv_cache_interface import KVCacheLayout

    return (KVCacheLayout.LBHNC,)


def flash_attention(layer: Layer, device: torch.device) -> Flash | None:
    """vLLM's FlashAttention for the layer's heads; None where it has none: on a CPU, for wide heads."""
    if device.type != "cuda" or layer.head_dim > FLASH_CHANNELS or layer.head_dim % 8:
        return None
    try:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

        version = get_flash_attn_version(head_size=layer.head_dim)
    except ImportError:
        return None
    if version is None:
        return None

    def flash(
        q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, most_q: int, most_k: int, scale: float, causal: bool,
        window: int | None,
    ) -> Partial:  # fmt: skip
        found: Partial = flash_attn_varlen_func(
            q, k, v, most_q, q_starts, most_k, k_starts, softmax_scale=scale, causal=causal, softcap=layer.softcap, fa_version=version,
            window_size=[-1, -1] if window is None else [window - 1, 0], return_softmax_lse=True,
        )  # fmt: skip
        return found

    return flash


# --- the places of requests ------------------------------------------------------------------------------------------------


def places(config: Any) -> int:
    """How many residuals requests need. A runner of the second version numbers requests itself; the first also holds preempted ones."""
    most = int(config.scheduler_config.max_num_seqs)
    return most if _numbers_requests(config) else 2 * most


def _numbers_requests(config: Any) -> bool:
    return bool(getattr(config, "use_v2_model_runner", False)) and config.device_config.device_type != "cpu"


def slots_of(meta: Any, computed: Sequence[int], page: int, count: int, spare: int) -> np.ndarray[Any, Any]:
    """The residual's slot of each row of a step, int32; `spare` for rows that are no request.

    `computed` are the rows' tokens before the step. Raises KvgenError where a request's residual is gone.
    """
    found = np.full(meta.num_reqs, spare, dtype=np.int32)
    given = getattr(meta, "req_idx", None)
    if given is None:
        given = _given_numbers
    if given is not None:
        known = np.asarray(given)[: meta.num_reqs]
        found[: len(known)] = known
    elif _runner is not None:
        ids = _runner.input_batch.req_ids[: meta.num_reqs]
        slots = _runner.__dict__.setdefault(WRAPPED, RequestSlots(count))
        found[: len(ids)] = slots.of(ids, _runner.requests, computed, page)
    return found


def _watch_runners() -> None:
    """Which requests the rows are is known to the runner alone, except where the metadata has `req_idx`."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def first(stock: Any) -> Any:
        @wraps(stock)
        def build(self: Any, *args: Any, **more: Any) -> Any:
            global _runner
            _runner = self if more.get("num_scheduled_tokens") is not None else None  # a dummy step has none
            try:
                return stock(self, *args, **more)
            finally:
                _runner = None

        return build

    _wrap(GPUModelRunner, "_build_attention_metadata", first)
    from vllm.v1.attention.backend import CommonAttentionMetadata

    if "req_idx" in CommonAttentionMetadata.__dataclass_fields__:
        return
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    def second(stock: Any) -> Any:
        @wraps(stock)
        def prepare_attn(self: Any, input_batch: Any, *args: Any, **more: Any) -> Any:
            global _given_numbers
            _given_numbers = input_batch.idx_mapping_np
            try:
                return stock(self, input_batch, *args, **more)
            finally:
                _given_numbers = None

        return prepare_attn

    _wrap(DefaultModelState, "prepare_attn", second)
