"""vLLM's attention backend over kvgen's kernels.

Packed blocks lie in vLLM's pages, a page being a multiple of a block. Where a format quantizes tokens as they arrive, they hold all of a
request. Else its newest tokens, which no block holds, lie in a pool of each layer, by the number of the request. A page that prefix
caching may hit is full, so a request begins with an empty residual, and all of kvgen's state is a function of lengths: preemption,
rollback and reused numbers need no code.

vLLM hashes a page when it is scheduled, not when it is written, so a row may read what another row writes in the same step. Therefore
each layer first writes the tokens of all rows, and then attends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)

from kvgen.integrations.vllm import formats, versions
from kvgen.integrations.vllm.scales import scales_of
from kvgen.runtime.chunks import Pieces
from kvgen.runtime.paged import PagedCalls, Rows, StepPlan, Store, residual_shape, runs_of
from kvgen.runtime.varlen import TOTAL_BYTES

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


class KvgenBackend(AttentionBackend):
    """What vLLM asks before it makes a layer."""

    accept_output_buffer = True
    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[KvgenImpl]:
        return KvgenImpl

    @staticmethod
    def get_builder_cls() -> type[KvgenBuilder]:
        return KvgenBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(formats.LEAST_PAGE)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return formats.page()

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """A preset, or the model's own dtype, which the user of a checkpoint with scales for fp8 has to name."""
        return kv_cache_dtype is None or kv_cache_dtype in ("auto", *DTYPES.values()) or kv_cache_dtype.startswith(formats.DTYPE)

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Of formats whose pages hold all of a request; a layer of another one refuses connectors when it is made."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False

    @classmethod
    def cell_of(cls, spec: Any) -> int:
        """Bytes of a token of one KV head in a page."""
        if getattr(spec, "head_size_v", spec.head_size) != spec.head_size:
            raise formats.refused("heads of other sizes for V than for K", "kvgen's caches have as many channels of both")
        form = formats.of(spec)
        # vLLM sizes a page of one token before it chooses the pages of a sliding window
        return form.cell(spec.block_size if spec.block_size >= formats.LEAST_PAGE else form.unit)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return versions.sized(spec, cls.cell_of(spec))

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        return versions.layouts()

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Of releases without layouts."""
        return num_blocks, num_kv_heads, block_size, formats.of_heads(num_kv_heads, head_size, None).cell(block_size)


@dataclass
class KvgenMetadata(AttentionMetadata):
    """A step, for all layers of a builder."""

    calls: PagedCalls
    slots: Tensor
    """int64 [tokens]: where vLLM has a place for each token, -1 for none."""
    packed: tuple[Tensor, Rows] | None
    """int32 [rows], the new tokens of each row, and the rows before them; None where tokens are quantized as they arrive."""
    after: Rows
    starts: Sequence[int]
    bounds: Sequence[int]
    plan: StepPlan | None
    """Of the decode steps, which are the first rows."""
    given: Tensor
    """int32 [rows + 1]: where the tokens of each row begin."""
    pieces: Mapping[tuple[int, int], Pieces]
    """Of rows of a few tokens, which are no decode steps."""


class KvgenBuilder(AttentionMetadataBuilder[KvgenMetadata]):
    """Prepares a step: lengths, slots and the plan, in memory that CUDA graphs keep reading. Nothing reads the device on the host."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold: int | None = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        found = {id(form.kernel(kv_cache_spec.block_size)): form for form in (layer.impl.format for layer in layers.values())}
        if len(found) != 1:
            raise formats.refused("layers of several formats that share their pages", "they would need plans of their own")
        form = next(iter(found.values()))
        for name, layer in layers.items():
            layer.impl.scales = scales_of(vllm_config, form, name, device)
        self.page, self.arrival = kv_cache_spec.block_size, form.arrival
        if any(layer.impl._residuals[0].shape[1:] != residual_shape(form.kernel(self.page)) for layer in layers.values()):
            raise formats.refused(f"pages of {self.page} tokens", f"residuals were made for others: --block-size {self.page}")
        captured = getattr(vllm_config.compilation_config, "max_cudagraph_capture_size", None) or 0
        rows = max(vllm_config.scheduler_config.max_num_seqs, captured)
        longest = -(-vllm_config.model_config.max_model_len // self.page) * self.page
        flash = versions.flash_attention(form.layer, device)
        self.calls = PagedCalls(form.kernel(self.page), rows, longest, device, chunks=form.chunks(self.page, device), flash=flash)
        self._numbers = torch.zeros(4, rows, dtype=torch.int32, device=device)
        self._places = versions.places(vllm_config)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> KvgenMetadata:
        meta = common_attn_metadata
        rows = meta.num_reqs
        starts = meta.query_start_loc_cpu[: rows + 1].tolist()
        # a draft's rows may have tokens that the host's bounds lack
        bound = None if fast_build else getattr(meta, "seq_lens_cpu_upper_bound", None)
        bounds = ([meta.max_seq_len] * rows) if bound is None else bound[:rows].tolist()
        lengths, before, counts, places = (numbers[:rows] for numbers in self._numbers)
        lengths.copy_(meta.seq_lens[:rows])
        after = Rows(lengths, meta.block_table_tensor[:rows], places)
        packed = None
        if not self.arrival:
            computed = [bound - end + start for bound, start, end in zip(bounds, starts, starts[1:], strict=False)]
            slots = versions.slots_of(meta, computed, self.page, self._places, self._places)
            places.copy_(torch.from_numpy(slots), non_blocking=True)
            begin = meta.query_start_loc[:rows].long().clamp(max=max(0, len(meta.slot_mapping) - 1))
            real = meta.slot_mapping[begin] >= 0  # rows of a dummy step are no requests
            counts.copy_((meta.query_start_loc[1 : rows + 1] - meta.query_start_loc[:rows]) * real)
            torch.sub(lengths, counts, out=before)
            packed = counts, Rows(before, after.block_table, places)
        if meta.max_query_len == 1:  # padded rows have no token by the host's count, and one in the graph
            starts = list(range(rows + 1))
        self.calls.check()
        first, tokens = next(runs_of(starts), (slice(0, 0), 0))  # the decode steps, which vLLM puts first
        plan = self.calls.plan(after[first], tokens) if 0 < tokens <= self.calls.most_q else None
        pieces = self.calls.pieces(after, starts, bounds=bounds, own=packed is not None)
        return KvgenMetadata(self.calls, meta.slot_mapping, packed, after, starts, bounds, plan, meta.query_start_loc, pieces)


class KvgenImpl(AttentionImpl[KvgenMetadata]):
    """One layer: its residuals, and its calls."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **more: Any,
    ) -> None:
        """Raises UnsupportedError, by name, for what kvgen does not compute."""
        config = get_current_vllm_config()
        formats.check(config)
        unknown = {name: value for name, value in more.items() if value}
        for what, given, reason in (
            ("ALiBi", alibi_slopes, "kernels have no bias of scores"),
            ("layers that share K and V of others", kv_sharing_target_layer_name, "each layer has blocks of its own"),
            (f"attention of type {attn_type}", attn_type != "decoder", "caches are of causal self-attention"),
            (
                f"--kv-cache-dtype {kv_cache_dtype}",
                not KvgenBackend.supports_kv_cache_dtype(kv_cache_dtype),
                f"a format is chosen by {formats.EXAMPLE}",
            ),
            (f"{', '.join(unknown)} of an attention layer", unknown, "kvgen does not know it"),
        ):
            if given:
                raise formats.refused(what, reason)
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads or num_heads
        self.scale, self.kv_cache_dtype = float(scale), kv_cache_dtype
        drafts = getattr(config.speculative_config, "num_speculative_tokens", None) or 0
        self.format = formats.add(
            config,
            formats.Layer(
                num_heads, self.num_kv_heads, head_size, DTYPES[config.model_config.dtype], sliding_window, float(logits_soft_cap or 0.0),
                sinks is not None, min(8, drafts + 1),
            ),
        )  # fmt: skip
        self._given_sinks = sinks
        self._sinks: Tensor | None = None
        self._store: Store | None = None
        self.scales: Tensor | None = None
        """Static ones, once the weights are loaded."""
        cache = config.cache_config
        kernel = self.format.kernel(cache.block_size if cache.user_specified_block_size else self.format.unit)
        shape = 1 if self.format.arrival else versions.places(config) + 1, *residual_shape(kernel)
        device = torch.device(config.device_config.device_type)
        # here, so that vLLM's profiling counts them; the last one is for rows that are no request
        self._residuals = torch.zeros(shape, dtype=kernel.dtype, device=device), torch.zeros(shape, dtype=kernel.dtype, device=device)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self._sinks = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: KvgenMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Fill `output` [tokens, heads, head_size], or [tokens, heads * head_size]."""
        if attn_metadata is None:  # while memory is profiled, which shall count what prompts take
            torch.empty(TOTAL_BYTES if query.is_cuda else 0, dtype=torch.uint8, device=query.device)
            return output.zero_()
        m, store = attn_metadata, self._bound(kv_cache, attn_metadata.calls)
        tokens, new = m.starts[-1], None
        q, k, v = query[:tokens], key[:tokens], value[:tokens]
        out = output.view(-1, self.num_heads, self.head_size)[:tokens]
        if m.packed is None:
            m.calls.write(k, v, store, m.slots[:tokens])
        else:
            counts, before = m.packed
            m.calls.pack(k, v, counts, store, before, m.starts, on_device=m.given[: len(m.starts)])
            new = k, v
        m.calls.attend(
            q, out, store, m.after, m.starts, scale=self.scale, sinks=self._sinks, plan=m.plan, bounds=m.bounds, new=new, pieces=m.pieces
        )  # fmt: skip
        return output

    def _bound(self, kv_cache: Tensor, calls: PagedCalls) -> Store:
        """vLLM's pages of the layer, and its residuals."""
        if self._store is None or self._store.packed.data_ptr() != kv_cache.data_ptr():
            pages = kv_cache.shape[0]
            self._store = Store(kv_cache.view(torch.uint8).view(pages, *calls.page_shape), *self._residuals, self.scales)
        if self._given_sinks is not None and self._sinks is None:
            self._sinks = self._given_sinks.detach().float().contiguous()
        return self._store
