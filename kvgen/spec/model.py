"""The spec language: what is computed, and nothing about how.

Formats follow BitDecoding (K per channel, V per token), TurboMind and QServe (per token), PyTorch's INT4 GQA (per token,
several groups), Kitty (2-bit K with boosted channels, sink and local window), KIVI, and the INT8 per-channel paper.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvgen.digest import digest

Axis = Literal["channel", "token"]
Bits = Literal[2, 4, 8, 16]
DType = Literal["float16", "bfloat16", "float32"]
Arch = Literal["native", "cpu", "sm80", "sm89", "sm90"]

MAX_KV_LEN = 1 << 24
MAX_BATCH = 1 << 16


class Model(BaseModel):
    """Frozen, strict about names: an unknown field is a mistake, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class AttentionSpec(Model):
    """Heads and arithmetic of the attention itself."""

    q_heads: int = Field(gt=0, le=4096)
    """Query heads."""
    kv_heads: int = Field(gt=0, le=4096)
    """Key/value heads; `q_heads` is a multiple of it (grouped-query attention)."""
    head_dim: int = Field(gt=0, le=1024, multiple_of=16)
    """Channels per head."""
    dtype: DType = "float16"
    """Type of q, new k and v, the residual and the output."""
    q_len: int = Field(default=1, ge=1, le=65536)
    """Most query tokens per call; they attend causally among themselves."""
    softcap: float = Field(default=0.0, ge=0.0)
    """Scores become softcap * tanh(score / softcap); 0 switches it off."""
    window: int | None = Field(default=None, gt=0)
    """Each query sees only the last `window` tokens, its own included."""
    sinks: bool = False
    """One learned logit per query head joins the softmax denominator (gpt-oss)."""

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @model_validator(mode="after")
    def _heads_divide(self) -> AttentionSpec:
        if self.q_heads % self.kv_heads:
            raise ValueError(f"q_heads ({self.q_heads}) must be a multiple of kv_heads ({self.kv_heads})")
        return self


class BoostSpec(Model):
    """Channels of a 2-bit K kept in 4 bits (Kitty)."""

    fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of channels per group that gets 4 bits."""
    select: Literal["mean_abs", "range", "static"] = "mean_abs"
    """How boosted channels are chosen: largest mean |k|, largest max-min, or the first ones."""


class QuantSpec(Model):
    """How one of K and V is stored."""

    bits: Bits
    """Bits per element; 16 keeps `dtype`."""
    axis: Axis
    """channel: one scale per channel per `group` tokens. token: one scale per token per `group` channels."""
    group: int = Field(default=128, gt=0)
    """Elements that share a scale."""
    zero: bool = True
    """Asymmetric (scale and zero) or symmetric (scale alone)."""

    @property
    def quantized(self) -> bool:
        """False where elements are kept in `dtype`."""
        return self.bits != 16


class KeySpec(QuantSpec):
    """How K is stored."""

    axis: Axis = "channel"
    boost: BoostSpec = BoostSpec()

    @model_validator(mode="after")
    def _boost_on_two_bits(self) -> KeySpec:
        if self.boost.fraction > 0 and (self.bits != 2 or self.axis != "channel" or not self.zero):
            raise ValueError("boost applies to asymmetric 2-bit K with one scale per channel only")
        return self


class ValueSpec(QuantSpec):
    """How V is stored."""

    axis: Axis = "token"


class CacheSpec(Model):
    """How the cache is laid out over a sequence."""

    layout: Literal["contiguous", "paged"] = "contiguous"
    """contiguous: one run of blocks per sequence. paged: pages found through a block table."""
    page: int | None = Field(default=None, gt=0)
    """Tokens per page; a multiple of the residual block."""
    sink: int = Field(default=0, ge=0)
    """First tokens kept in `dtype` for good."""
    local: int = Field(default=0, ge=0)
    """Most recent tokens of V kept in `dtype`."""

    @model_validator(mode="after")
    def _page_with_paged(self) -> CacheSpec:
        if (self.layout == "paged") != (self.page is not None):
            raise ValueError("`page` is given exactly when layout is `paged`")
        if self.page is not None and self.page % 16:
            raise ValueError(f"page ({self.page}) must be a multiple of 16 tokens")
        return self


class Workload(Model):
    """A shape that a variant is tuned for."""

    batch: int = Field(gt=0, le=MAX_BATCH)
    kv_len: int = Field(gt=0, le=MAX_KV_LEN)
    q_len: int = Field(default=1, ge=1)
    weight: float = Field(default=1.0, gt=0)
    """Share in the geometric mean that picks the layout."""

    @property
    def key(self) -> str:
        """Short name: batch x kv_len, and q_len where it is not 1."""
        return f"{self.batch}x{self.kv_len}" + (f"q{self.q_len}" if self.q_len > 1 else "")


class KernelSpec(Model):
    """A KV-cache format, the attention over it, and the shapes that matter."""

    name: str = Field(default="kernel", min_length=1, max_length=80, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    arch: Arch = "native"
    attention: AttentionSpec
    key: KeySpec
    value: ValueSpec
    cache: CacheSpec = CacheSpec()
    workloads: tuple[Workload, ...] = Field(default=(Workload(batch=1, kv_len=4096),), min_length=1)

    def format(self) -> dict[str, Any]:
        """What a kernel computes, without name, arch and workloads: the part that two specs must share."""
        return self.model_dump(mode="json", include={"attention", "key", "value", "cache"})

    @property
    def format_id(self) -> str:
        """Digest of `format()`."""
        return digest(self.format())

    @model_validator(mode="after")
    def _groups_fit(self) -> KernelSpec:
        problems = list(_format_problems(self))
        if problems:
            raise ValueError("; ".join(problems))
        return self


def _format_problems(spec: KernelSpec) -> list[str]:
    """Combinations that no machine could run, each with its reason."""
    problems = []
    dim = spec.attention.head_dim
    for label, quant in (("key", spec.key), ("value", spec.value)):
        if not quant.quantized:
            continue
        if quant.axis == "token" and dim % quant.group:
            problems.append(f"{label}.group ({quant.group}) must divide head_dim ({dim}) when the axis is token")
        if quant.axis == "channel" and quant.group % 16:
            problems.append(f"{label}.group ({quant.group}) must be a multiple of 16 tokens when the axis is channel")
        page = spec.cache.page
        if page is not None and quant.axis == "channel" and page % quant.group:
            problems.append(f"cache.page ({page}) must be a multiple of {label}.group ({quant.group}): a page holds whole groups")
    for work in spec.workloads:
        if work.q_len > spec.attention.q_len:
            problems.append(f"workload {work.key} has q_len {work.q_len}, more than attention.q_len ({spec.attention.q_len})")
    return problems
