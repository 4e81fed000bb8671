"""`KvgenCache`: the cache of a transformers model, whose layers are kvgen's packed caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from itertools import count
from typing import Any, NamedTuple, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache, CacheLayerMixin

from kvgen.api import get_kernel
from kvgen.format.residual import most_rollback
from kvgen.integrations.transformers.passes import LayerGroup, Passes, States
from kvgen.spec import KernelSpec, layers
from kvgen.spec.layers import Format

NAME = "kvgen"
"""Of the attention function: `attn_implementation`."""
CACHE_ARGUMENT = "cache" if "cache" in signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"
"""The name by which `generate` and models take a cache: transformers 5.24 renamed it, and warns of the old one."""
WRONG_ATTENTION = (
    f'KvgenCache needs the attention function "{NAME}", and the model has {{}}: load the model with attn_implementation="{NAME}" or call '
    f'model.set_attn_implementation("{NAME}"), and make the cache of model.config'
)

_caches: WeakValueDictionary[int, KvgenCache] = WeakValueDictionary()
_numbers = count()


def layer_specs(
    config: Any, spec: Format | Mapping[str, Format] | Sequence[Format], *, batch: int = 1, max_len: int = 4096
) -> list[KernelSpec]:
    """The spec of every layer of a model with this configuration (`model.config`), as `kvgen.spec.layers.layer_specs` makes them.

    The dtype of a format without one is the configuration's, and torch's default where it has none. Raises TypeError for something else
    than a configuration, and as that function does.
    """
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"config must be the model's configuration (model.config), not {type(config).__name__}")
    text = config if getattr(config, "is_encoder_decoder", False) else config.get_text_config(decoder=True)
    known = {**text.to_dict(), "model_type": text.model_type}  # to_dict has that of the class
    default = str(torch.get_default_dtype()).removeprefix("torch.")
    return layers.layer_specs(known, spec, batch=batch, max_len=max_len, dtype=default)


class Appended(NamedTuple):
    """What `update` returns in place of K: the new K and V, and the layer whose attention appends them."""

    layer: KvgenLayer
    k: Tensor
    v: Tensor

    def __getattr__(self, name: str) -> NoReturn:
        """Raises ValueError for what another attention function reads of K: its shape, say."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise ValueError(WRONG_ATTENTION.format("another one"))

    @classmethod
    def __torch_function__(cls, *_: object) -> NoReturn:
        """Raises ValueError for an attention function that gives it to torch as it is."""
        raise ValueError(WRONG_ATTENTION.format("another one"))


class KvgenLayer(CacheLayerMixin):
    """One layer of a `KvgenCache`. What changes all layers at once is the cache's task: `reset`, `crop`, `reorder_cache`."""

    is_compileable = False
    """`generate` would compile by itself, anew for every length."""
    supports_early_init = False

    def __init__(self, passes: Passes, layer_idx: int, number: Tensor, config: Any) -> None:
        """`number` is that of the `KvgenCache`, for the operator of compiled models."""
        super().__init__()
        self.passes, self.layer_idx, self.number, self.config = passes, layer_idx, number, config
        self.group, index = passes.layers[layer_idx]
        self.cache = self.group.caches[index]
        self.spec = self.group.kernel.spec
        self.is_sliding = self.spec.attention.window is not None
        self.is_croppable = most_rollback(self.spec) > 0
        self.is_initialized = True
        self.batch = self.batch_size = self.max_batch_size = self.cache.batch

    def __repr__(self) -> str:
        return f"KvgenLayer({self.spec.name}, {self.cache!r})"

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the cache is allocated when it is made."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Any, Tensor]:
        """The new K and V, [batch, kv_heads, tokens, head_dim], on their way to the attention function, which appends them."""
        if self.config._attn_implementation != NAME:
            raise ValueError(WRONG_ATTENTION.format(f'"{self.config._attn_implementation}"'))
        if not torch.compiler.is_compiling() and key_states.shape[0] != self.batch:  # a compiled model is compiled for every batch
            raise ValueError(
                f"the cache holds {self.batch} sequences, and the model runs {key_states.shape[0]}: with beams or several answers to a "
                "prompt, batch is the number of all of them"
            )
        return Appended(self, key_states, value_states), value_states

    def run(self, x: States, mask: Tensor | None) -> Tensor:
        """Attention over the cache and the new tokens, which are appended: [batch, tokens, q_heads, head_dim]."""
        return self.passes.run(self.layer_idx, x, mask)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """(kv_length, kv_offset) of masks: all positions, also those before a window, because the mask says which of them are padding."""
        tokens = query_length if isinstance(query_length, int) else query_length.shape[0]
        return (self.passes.positions or 0) + tokens, 0

    def get_seq_length(self) -> int:
        """Positions that the model has seen, padding included. Raises ValueError where sequences were filled one by one."""
        if self.passes.positions is None:
            raise ValueError("these sequences were filled one by one and have lengths of their own: pass position_ids to the model")
        return self.passes.positions

    def get_max_length(self) -> int:
        """Most tokens of a sequence, padding not counted."""
        return self.cache.max_len

    get_max_cache_shape = get_max_length
    """The name in the first releases of transformers 5."""

    def offload(self) -> None:
        """Refused."""
        raise ValueError("a KvgenCache is not offloaded: its caches stay on their device")


class KvgenCache(Cache):
    """The KV cache of a transformers model, in kvgen's packed formats.

    `model.generate(..., **KvgenCache(model.config, spec, batch, max_len).argument)` with `attn_implementation="kvgen"`. Prompts run on
    torch's attention or kvgen's extend attention and are packed; decode steps read the packed cache. Padding is not stored.
    `copy.deepcopy` copies it, for prompts that begin alike.
    """

    def __init__(
        self,
        config: Any,
        spec: Format | Mapping[str, Format] | Sequence[Format],
        batch: int,
        max_len: int,
        device: torch.device | str | None = None,
        scales: Sequence[tuple[Any, Any]] | None = None,
    ) -> None:
        """Empty, for `batch` sequences (with beams: all of them) of up to `max_len` tokens each, padding not counted.

        `config` is the model's own (`model.config`). `spec` is a format for all layers, by layer type, or one for each layer, as
        `layer_specs` takes them. Kernels are fetched as `kvgen.get_kernel` does: what was not tuned warns. `device` is the GPU that holds
        all layers, by default the current one. It does not choose the kernels: for a model on the CPU, put `arch: cpu` into the spec.
        `scales` are those of K and of V of every layer, where formats have static ones, as `kvgen.load_scales` gives them.

        Raises as `layer_specs` and `get_kernel` do, ValueError where layers differ in `cache.rollback`, where `device` and `arch`
        disagree and on wrong scales, ToolchainMissing for a GPU that does not exist.
        """
        specs = layer_specs(config, spec, batch=batch, max_len=max_len)
        rollbacks = sorted({most_rollback(each) for each in specs})
        if len(rollbacks) > 1:
            raise ValueError(
                f"the layers of a model are cropped together: cache.quantize and cache.rollback must be the same in all, and {rollbacks} "
                "tokens may be taken back"
            )
        if scales is not None and len(scales) != len(specs):
            raise ValueError(f"the model has {len(specs)} layers, and scales of {len(scales)} were given")
        given: Sequence[tuple[Any, Any] | None] = [None] * len(specs) if scales is None else scales
        groups: dict[KernelSpec, LayerGroup] = {}
        for each in dict.fromkeys(specs):
            kernel = get_kernel(each)
            own, *others = (pair for one, pair in zip(specs, given, strict=True) if one == each)
            first = kernel.new_cache(batch, max_len, device=device, scales=own)
            groups[each] = LayerGroup(kernel, [first, *(kernel.new_cache(like=first, scales=pair) for pair in others)])
        self._fill(config.get_text_config(decoder=True), Passes([groups[each] for each in specs]))

    def _fill(self, config: Any, passes: Passes) -> None:
        """Make layers over the caches that `passes` runs."""
        self.config, self.passes, self.number = config, passes, next(_numbers)
        _caches[self.number] = self
        number = torch.tensor(self.number, device="cpu")
        super().__init__(layers=[KvgenLayer(passes, layer_idx, number, config) for layer_idx in range(len(passes.layers))])

    def __deepcopy__(self, memo: dict[int, Any]) -> KvgenCache:
        """The same tokens in other memory. The copy is for the same model, so kernels and configuration are shared."""
        copied = memo[id(self)] = object.__new__(KvgenCache)
        copied._fill(self.config, self.passes.copy())
        return copied

    @property
    def argument(self) -> dict[str, KvgenCache]:
        """The cache as an argument of `model.generate` and of the model, by the name that this release of transformers has for it."""
        return {CACHE_ARGUMENT: self}

    @property
    def groups(self) -> list[LayerGroup]:
        """The layers by spec."""
        return self.passes.groups

    @property
    def device(self) -> torch.device:
        """Of the caches."""
        return self.groups[0].first.device

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.groups[0].first.batch

    @property
    def max_len(self) -> int:
        """Most tokens of a sequence."""
        return self.groups[0].first.max_len

    @property
    def lengths(self) -> Tensor:
        """Tokens of every sequence, padding not counted: int32 [batch] on the device."""
        return self.groups[0].first.lengths

    @property
    def nbytes(self) -> int:
        """Bytes of packed blocks and residuals of all layers."""
        return sum(cache.nbytes for group in self.groups for cache in group.caches)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Tensor]:
        """As `KvgenLayer.update`. Raises ValueError for a layer that the cache does not have."""
        if layer_idx >= len(self.layers):
            raise ValueError(f"the model runs layer {layer_idx}, and the cache has {len(self.layers)} layers: make it of model.config")
        found: tuple[Any, Tensor] = self.layers[layer_idx].update(key_states, value_states)
        return found

    def append(self, states: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Append K and V that the model computed over another cache: of every layer, [batch, kv_heads, tokens, head_dim].

        A prompt is thus run once for several formats: `[(layer.keys, layer.values) for layer in DynamicCache().layers]` are its states.
        Raises ValueError on wrong layers or tokens, CacheMismatch where there is no room.
        """
        self.passes.append(states)

    def get_query_offset(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """0: kvgen's masks are padding alone, and causality is the kernel's."""
        return 0

    def crop(self, tokens: int | Tensor) -> None:
        """Take back `-tokens` positions; a positive number is the length to keep, as in the first releases of transformers 5.

        Raises ValueError at padding and beyond `cache.rollback` of the spec: more than that below the most positions that there were since
        the last reset. Nothing is changed then.
        """
        tokens = int(tokens)  # some releases count drafts on the device
        if tokens:
            self.passes.crop(-tokens if tokens < 0 else max(0, self.get_seq_length() - tokens))

    def reset(self) -> None:
        """Forget every token."""
        self.passes.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence b continues what sequence `beam_idx[b]` was. Raises ValueError for paged formats."""
        self.passes.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: the memory is allocated for a fixed batch."""
        if repeats != 1:
            raise ValueError("a KvgenCache has a fixed batch: make it for all sequences, and prefill them all")

    def batch_select_indices(self, indices: Tensor) -> None:  # noqa: ARG002
        """Refused: the memory is allocated for a fixed batch."""
        raise ValueError("a KvgenCache has a fixed batch: reorder_cache keeps the number of sequences")

    def row(self, index: int) -> KvgenCache:
        """Sequence `index` as a cache of batch 1 over the same memory: a prompt for it is prefilled by `model(..., **row.argument)`.

        From then on the sequences have lengths of their own, so the whole cache takes decode steps with `position_ids` and without an
        attention_mask. Waits for the device. A row is for use until the lengths of the whole cache change otherwise.
        """
        row = object.__new__(KvgenCache)
        row._fill(self.config, self.passes.row(index))
        return row

    def reset_rows(self, rows: Sequence[int]) -> None:
        """Forget every token of some sequences, which take no part in steps from then on. The others have lengths of their own."""
        self.passes.one_by_one()
        for group in self.groups:
            group.first.reset(rows)

    def check(self) -> None:
        """Raises CacheMismatch once where the device refused an earlier step, in a replay of a CUDA graph too, for lack of room."""
        self.passes.check()


def layer_of(number: Tensor, layer: int) -> KvgenLayer:
    """The layer of the cache of that number, for the operator of compiled models. Raises KeyError once the cache is gone."""
    found: KvgenLayer = _caches[int(number)].layers[layer]
    return found
