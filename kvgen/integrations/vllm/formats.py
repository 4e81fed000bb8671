"""Which format a layer has: what `additional_config` says, with the heads and masks of vLLM's layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import lcm
from typing import Any

from kvgen.errors import SpecError, UnsupportedError
from kvgen.format.scales import has_static_scales
from kvgen.spec import KernelSpec, load_spec
from kvgen.spec.layers import CALLER, FULL, SLIDING

PAGE = 128
"""Tokens of a page, unless the user chooses another number or a format's blocks have more."""
LEAST_PAGE = 16
"""Every page is a multiple of so many tokens: vLLM asks before it knows a layer."""
MOST_Q = 8
"""Query tokens of a row that a kernel takes at most."""
LOOKUPS = "ngram", "ngram_gpu", "suffix"
"""Methods of speculative decoding whose drafts no model makes."""
DTYPE = "kvgen-"
"""What a preset's name begins with as a `--kv-cache-dtype`."""
EXAMPLE = """--additional-config '{"kvgen": {"preset": "saw-int4"}}'"""


def refused(what: str, reason: str) -> UnsupportedError:
    """What kvgen does not serve, by name."""
    return UnsupportedError(f"vLLM: {what}", reason, is_backend=False)


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Refuse what the spec language does."""
    try:
        yield
    except (SpecError, ValueError) as error:
        raise refused(what, str(error)) from error


@dataclass(frozen=True)
class Layer:
    """What vLLM says of a layer: the fields of `attention` in a spec."""

    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    window: int | None
    softcap: float
    sinks: bool
    q_len: int

    @property
    def key(self) -> tuple[int, int, int | None]:
        """What vLLM's own spec of a KV cache knows of it."""
        return self.kv_heads, self.head_dim, self.window


class Format:
    """The format of alike layers: a spec for each size of pages, and its kernel."""

    def __init__(self, given: Mapping[str, Any], layer: Layer, rollback: int = 0, *, hits: bool = True) -> None:
        """`given` is a format without heads, `rollback` the tokens that speculative decoding may take back, `hits` whether requests share
        pages. Raises UnsupportedError, by name, for what cannot be served.
        """
        self.layer = layer
        given = dict(given)
        self.file = given.pop("scales", None)
        attention, cache = dict(given.get("attention") or {}), dict(given.get("cache") or {})
        for name, fact in asdict(layer).items():
            if attention.get(name) and attention[name] != fact and name != "q_len":
                raise refused(f"attention.{name} of the format", f"it is {attention[name]}, and {fact} in the model's layers")
        attention |= asdict(layer) | {"q_len": max(layer.q_len, attention.get("q_len") or 1)}
        chosen = cache.get("quantize")
        cache |= {"layout": "contiguous", "page": None}
        with refusing("the format"):
            self._spec = load_spec({"name": "vllm", **given, "attention": attention, "cache": cache})
            if self._spec.key.rotate is not None and self._spec.key.rotate.applied == "caller":
                raise refused("key.rotate.applied: caller", CALLER)
            if chosen is None and arrives(self._spec):
                self._spec = replace(self._spec, cache=replace(self._spec.cache, quantize="arrival", rollback=0))
            if not self._spec.cache.arrival:  # else any number of tokens may be taken back
                kept = max(rollback, self._spec.cache.rollback)
                self._spec = replace(self._spec, cache=replace(self._spec.cache, rollback=kept))
        if hits and self._spec.cache.sink + self._spec.cache.local:
            raise refused(
                "cache.sink and cache.local beside prefix caching",
                "these tokens lie outside of the pages that requests share: --no-enable-prefix-caching",
            )
        if self.file is not None and not has_static_scales(self._spec):
            raise refused("scales beside this format", "its blocks hold their own: key.scale or value.scale is static")
        self._kernels: dict[int, Any] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Format) and (self._spec, self.file) == (other._spec, other.file)

    __hash__ = None  # type: ignore[assignment]

    @property
    def arrival(self) -> bool:
        """Whether every token is quantized when it is written, so that all of a request is in its pages."""
        return self._spec.cache.arrival

    def spec(self, page: int) -> KernelSpec:
        """The spec for pages of so many tokens. Raises UnsupportedError where they do not fit the format."""
        with refusing(f"pages of {page} tokens"):
            return replace(self._spec, cache=replace(self._spec.cache, layout="paged", page=page))

    def kernel(self, page: int) -> Any:
        """The kernel for pages of so many tokens. Raises UnsupportedError where they do not hold whole blocks."""
        from kvgen.api import get_kernel

        if page not in self._kernels:
            self._kernels[page] = get_kernel(self.spec(page))
        if page % (tokens := self._kernels[page].layout.tokens):
            raise refused(f"pages of {page} tokens", f"the format has blocks of {tokens} tokens: --block-size {self.unit}")
        return self._kernels[page]

    def chunks(self, page: int, device: Any) -> Any:
        """The kernel of the same cache for rows of more tokens than a decode step has, on a GPU; None where it could not serve them."""
        from kvgen.api import get_kernel
        from kvgen.runtime.chunks import Chunks

        spec = self.spec(page)
        if device.type != "cuda" or spec.attention.q_len == MOST_Q or not Chunks.fit(self.kernel(page), page):
            return None
        return get_kernel(replace(spec, attention=replace(spec.attention, q_len=MOST_Q)))

    @cached_property
    def unit(self) -> int:
        """A page for what is the same in pages of any size."""
        return lcm(PAGE, *(op.group for op in (self._spec.key, self._spec.value) if op.axis == "channel" and op.group))

    def cell(self, page: int) -> int:
        """Bytes of a token of one KV head, K and V, in pages of so many tokens. Raises UnsupportedError where that is no whole number."""
        layout = self.kernel(page).layout
        if layout.block_bytes % layout.tokens:
            raise refused("the format", f"a block of {layout.tokens} tokens has {layout.block_bytes} bytes, no whole number for each token")
        return int(layout.block_bytes // layout.tokens)


def arrives(spec: KernelSpec) -> bool:
    """Whether tokens of the format can be quantized as they arrive: none keeps 16 bits for a while, no scale is of several tokens."""
    return not (spec.cache.sink + spec.cache.local or spec.key.per_channel or spec.value.per_channel)


_formats: dict[tuple[int, int, int | None], Format] = {}


def add(config: Any, layer: Layer) -> Format:
    """The format of a layer of the model that is being made. Raises UnsupportedError, by name, for what cannot be served."""
    given = chosen(config, FULL if layer.window is None else SLIDING)
    drafts = getattr(config.speculative_config, "num_speculative_tokens", None) or 0
    made = Format(given, layer, drafts, hits=bool(config.cache_config.enable_prefix_caching))
    method = getattr(config.speculative_config, "method", None)
    if not made.arrival and method not in (None, *LOOKUPS):
        raise refused(f"speculative decoding by {method}", "steps of a draft model do not tell where the format's residuals lie")
    if config.kv_transfer_config is not None and not made.arrival:
        raise refused("KV connectors", "the format keeps the newest tokens of a request outside of vLLM's pages")
    if _formats.get(layer.key) != made:
        _formats[layer.key] = made  # of another model, if there was one
    return _formats[layer.key]


def page() -> int:
    """Tokens of a page that suit every format, where the user asks for none."""
    return lcm(PAGE, *(form.unit for form in _formats.values()))


def of(spec: Any) -> Format:
    """The format of the layers with one of vLLM's specs of a KV cache."""
    return of_heads(spec.num_kv_heads, spec.head_size, getattr(spec, "sliding_window", None))


def of_heads(kv_heads: int, head_dim: int, window: int | None) -> Format:
    """The same by what vLLM's spec says."""
    return _formats[kv_heads, head_dim, window]


def chosen(config: Any, kind: str) -> Mapping[str, Any]:
    """The format that the user chose for layers of a kind."""
    given = (config.additional_config or {}).get("kvgen") if isinstance(config.additional_config, Mapping) else None
    dtype = str(config.cache_config.cache_dtype)
    if dtype.startswith(DTYPE):
        if given:
            raise refused(f"--kv-cache-dtype {dtype}", "--additional-config has a format already")
        given = dtype.removeprefix(DTYPE)
    if isinstance(given, str):
        given = {"preset": given}
    if not isinstance(given, Mapping) or not given:
        raise refused("--attention-backend CUSTOM", f"it is kvgen's, which needs a format: {EXAMPLE}")
    if set(given) <= {FULL, SLIDING}:
        given = given.get(kind)
        if not isinstance(given, Mapping) or not given:
            raise refused("the formats by kind of layer", f"the model has layers of {kind}, and there is none for them")
    return given


def check(config: Any) -> None:
    """Raises UnsupportedError for a setting of vLLM that kvgen does not serve."""
    parallel = config.parallel_config
    if getattr(parallel, "decode_context_parallel_size", 1) > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise refused("context parallelism", "a sequence's blocks lie on one device")
    if getattr(config.cache_config, "kv_cache_dtype_skip_layers", None):
        raise refused("--kv-cache-dtype-skip-layers", "pages of all layers have one size")
