"""The decode loops that `gpu_generate` compares: stock caches of transformers, a 16-bit cache with the fastest torch kernel, and kvgen's.

Every loop decodes sequences of one length, whose K and V are random. On a GPU the last two kinds run as one CUDA graph per step, with the
model compiled; on the CPU as plain calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count, product
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface, DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface

from kvgen.integrations.transformers import DecodeLoop, KvgenCache
from kvgen.runtime.kvcache import row_of

MARGIN = 256
"""Tokens that a loop may append to its sequences while it is timed."""
KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
Step = Callable[[], object]


class Loop(Protocol):
    """Decodes one token of every sequence at each `step`."""

    step: Step
    cache_bytes: int | None
    """Of the whole cache, if known."""
    note: str


def milliseconds(step: Step, steps: int, cuda: bool) -> float:
    """Per step, of so many steps in a row, after three others."""
    for _ in range(3):
        step()
    if not cuda:
        started = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - started) / steps * 1e3
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for _ in range(steps):
        step()
    marks[1].record()
    torch.cuda.synchronize()
    return float(marks[0].elapsed_time(marks[1])) / steps


def captured(step: Step, cuda: bool) -> Step:
    """The step as replays of a CUDA graph."""
    if not cuda:
        return step
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def random_states(config: Any, batch: int, tokens: int, like: torch.Tensor) -> torch.Tensor:
    """K and V, [2, batch, kv_heads, tokens, head_dim]."""
    return torch.randn(2, batch, config.num_key_value_heads, tokens, config.head_dim, dtype=like.dtype, device=like.device)


class Stock:
    """A cache of transformers with SDPA, called as a program would call it."""

    def __init__(self, model: Any, batch: int, length: int, make: Callable[[], Cache]) -> None:
        model.set_attn_implementation("sdpa")
        weight = model.lm_head.weight
        self.cache, self.model, self.note = make(), model, "eager, SDPA"
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=weight.device)
        self.length = length
        for layer in range(model.config.num_hidden_layers):
            k, v = random_states(model.config, batch, length, weight)
            self.cache.update(k, v, layer)
        c = model.config
        size = 2 * batch * length * c.num_key_value_heads * c.head_dim * c.num_hidden_layers * weight.element_size()
        self.cache_bytes = None if isinstance(self.cache, QuantizedCache) else size

    @torch.no_grad()
    def step(self) -> None:
        out = self.model(self.tokens, past_key_values=self.cache, use_cache=True)
        self.tokens.copy_(out.logits[:, -1].argmax(-1, keepdim=True))


def dynamic(model: Any, batch: int, length: int) -> Stock:
    """transformers' default."""
    return Stock(model, batch, length, partial(DynamicCache, config=model.config))


def static(model: Any, batch: int, length: int) -> Stock:
    """transformers' cache of a fixed size."""
    return Stock(model, batch, length, partial(StaticCache, config=model.config, max_cache_len=length + MARGIN))


def quantized(model: Any, batch: int, length: int, backend: str = "hqq") -> Stock:
    """transformers' quantized cache, 4 bits, which dequantizes everything at every step."""
    return Stock(model, batch, length, partial(QuantizedCache, backend, model.config, nbits=4))


# --- 16 bits in the same loop -----------------------------------------------------------------------------------------------


class Waiting(NamedTuple):
    """In place of K: the new K, and the layer that holds the others."""

    layer: PlainLayer
    k: torch.Tensor


class PlainLayer(CacheLayerMixin):
    """K and V of `length` tokens; a step overwrites the last, so that every step attends to as many, without a mask."""

    is_sliding = False

    def __init__(self, states: torch.Tensor, layer: int, number: torch.Tensor) -> None:
        super().__init__()
        self.states, self.layer, self.number = states, layer, number

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, torch.Tensor]:
        return Waiting(self, key_states), value_states

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        return 1, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return int(self.states.shape[3])

    get_max_cache_shape = get_max_length


_plain: WeakValueDictionary[int, Plain] = WeakValueDictionary()
_numbers = count()


@torch.library.custom_op("kvgen_benchmarks::plain_attention", mutates_args=())
def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, layer: int) -> torch.Tensor:
    """Write the new token and attend: q [batch, q_heads, 1, head_dim] to [batch, 1, q_heads, head_dim]."""
    plain = _plain[int(cache)]
    states = plain.cache.layers[layer].states
    states[0, :, :, -1:] = k
    states[1, :, :, -1:] = v
    return plain.attends(q, states[0], states[1]).transpose(1, 2).contiguous()


@plain_attention.register_fake
def _(q: torch.Tensor, *_: object) -> torch.Tensor:
    return q.transpose(1, 2).contiguous()


def _attention(_: Any, query: torch.Tensor, key: Waiting, value: torch.Tensor, *__: Any, **___: Any) -> tuple[torch.Tensor, None]:
    return plain_attention(query, key.k, value, key.layer.number, key.layer.layer), None


class Plain:
    """A 16-bit cache with the fastest of torch's kernels at this shape, the model compiled, a step in one CUDA graph."""

    def __init__(self, model: Any, forward: Callable[..., Any], batch: int, length: int) -> None:
        AttentionInterface.register("kvgen-benchmarks", _attention)
        AttentionMaskInterface.register("kvgen-benchmarks", lambda *_, **__: None)
        model.set_attn_implementation("kvgen-benchmarks")
        weight, number = model.lm_head.weight, next(_numbers)
        _plain[number] = self
        states = [random_states(model.config, batch, length, weight) for _ in range(model.config.num_hidden_layers)]
        self.cache = Cache(layers=[PlainLayer(x, layer, torch.tensor(number)) for layer, x in enumerate(states)])
        self.cache_bytes = sum(x.numel() * x.element_size() for x in states)
        self.forward = forward
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=weight.device)
        self.positions = torch.full_like(self.tokens, length)
        q = torch.randn(batch, model.config.num_attention_heads, 1, model.config.head_dim, dtype=weight.dtype, device=weight.device)
        self.attends, self.note = fastest(q, states)
        self.states = states
        self.step = captured(self._step, weight.is_cuda)

    @torch.no_grad()
    def _step(self) -> None:
        out = self.forward(input_ids=self.tokens, position_ids=self.positions, past_key_values=self.cache, use_cache=True)
        self.tokens.copy_(out.logits[:, -1].argmax(-1, keepdim=True))


def fastest(q: torch.Tensor, states: Sequence[torch.Tensor]) -> tuple[Callable[..., torch.Tensor], str]:
    """The fastest kernel and form of torch's attention over a cache of these sizes, and its name."""
    batch, heads, _, dim = q.shape
    kv_heads = states[0].shape[2]

    def run(kernel: SDPBackend | None, folded: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = q.reshape(batch, kv_heads, heads // kv_heads, dim) if folded else q
        if kernel is None:
            out = sdpa(rows, k, v, enable_gqa=not folded)
        else:
            with sdpa_kernel([kernel]):
                out = sdpa(rows, k, v, enable_gqa=not folded)
        return out.reshape(batch, heads, 1, dim)

    found: list[tuple[float, Callable[..., torch.Tensor], str]] = []
    for (name, kernel), folded in product((KERNELS if q.is_cuda else {"default": None}).items(), (True, False)):
        call = partial(run, kernel, folded)
        try:
            ms = milliseconds(lambda call=call: [call(q, x[0], x[1]) for x in states], 3, q.is_cuda)
        except RuntimeError:
            continue
        found.append((ms, call, f"{name}, {'folded' if folded else 'gqa'}"))
    best = min(found, key=lambda each: each[0])
    return best[1], best[2]


# --- kvgen ------------------------------------------------------------------------------------------------------------------


class Packed:
    """kvgen's cache and serving loop."""

    def __init__(self, model: Any, spec: Mapping[str, Any], batch: int, length: int, *, compiled: Any) -> None:
        model.set_attn_implementation("kvgen")
        self.cache = KvgenCache(model.config, spec, batch, length + MARGIN, device=model.device)
        self.loop = DecodeLoop(model, self.cache, compile=compiled, bound=length + MARGIN)
        self.cache_bytes = self.cache.nbytes
        self.note = ", ".join(sorted({group.kernel.selection.how for group in self.cache.groups}))
        for group in self.cache.groups:
            for cache in group.caches:
                fill(group.kernel, cache, length)
            group.caches[0].advance([length] * batch)
        self.loop.take(torch.zeros(batch, dtype=torch.int64, device=self.cache.device))
        self.step = self.loop.step


def fill(kernel: Any, cache: Any, length: int) -> None:
    """Random K and V of one sequence, copied to all others; lengths are left as they are."""
    a = kernel.spec.attention
    (row,) = row_of([cache], 0, 0)
    k, v = torch.randn(2, 1, length, a.kv_heads, a.head_dim, device=cache.device).to(kernel.dtype)
    kernel.prefill(row, k, v, advance=False)
    blocks = cache.packed.view(cache.batch, -1)  # a paged cache has its sequences' pages one behind the other
    for tensor in (blocks, cache.k_residual, cache.v_residual):
        tensor[1:] = tensor[:1]
