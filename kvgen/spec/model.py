"""The spec language. It says what is computed and nothing about how.

Formats follow BitDecoding (K per channel, V per token), TurboMind and QServe (per token), PyTorch's INT4 GQA (per token,
several groups), Kitty (2-bit K with boosted channels, sink and local window), KIVI, and the INT8 per-channel paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from kvgen.arch import Arch
from kvgen.digest import digest
from kvgen.spec import rules
from kvgen.spec.base import Limits, Model, Step
from kvgen.spec.limits import UNREADABLE


def integer(value: Any) -> Any:
    """4.0 and True equal integers in Python; a literal must not accept them."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    from pydantic_core import PydanticCustomError

    raise PydanticCustomError("int_type", "Input should be a valid integer")


def _without_sign(value: float) -> float:
    """-0.0 equals 0.0, but is another text in JSON and so another digest."""
    return value + 0.0


def not_too_many(value: Any) -> Any:
    """pydantic looks at all items of a list that is too long, and keeps an error for each."""
    if isinstance(value, (list, tuple)) and len(value) > MAX_WORKLOADS:
        from pydantic_core import PydanticCustomError

        raise PydanticCustomError("too_many", f"at most {MAX_WORKLOADS} workloads, not {len(value)}")
    return value


def _equal_lengths(value: Any) -> Any:
    """`equal` in place of a mapping."""
    if isinstance(value, str) and value == "equal":
        return EQUAL
    if isinstance(value, (Mapping, Lengths)) or value is UNREADABLE:
        return value
    from pydantic_core import PydanticCustomError

    from kvgen.spec.issues import shown

    raise PydanticCustomError("lengths", "must be equal, or a mapping with min, not {value}", {"value": shown(value)})


Axis = Literal["channel", "token"]
Bits = Annotated[Literal[2, 4, 8, 16], Step("before", integer)]
DType = Literal["float16", "bfloat16", "float32"]
UNSIGNED_ZERO = Step("after", _without_sign)

MAX_KV_LEN = 1 << 24
MAX_BATCH = 1 << 16
MAX_GROUP = 1 << 16
MAX_Q_LEN = 1 << 16
MAX_WORKLOADS = 256


class AttentionSpec(Model):
    """Heads and arithmetic of the attention itself."""

    q_heads: Annotated[int, Limits(gt=0, le=4096)]
    """Query heads."""
    kv_heads: Annotated[int, Limits(gt=0, le=4096)]
    """Key/value heads; `q_heads` is a multiple of it (grouped-query attention)."""
    head_dim: Annotated[int, Limits(gt=0, le=1024, multiple_of=16)]
    """Channels per head."""
    dtype: DType = "float16"
    """Type of q, new k and v, the residual and the output."""
    q_len: Annotated[int, Limits(ge=1, le=MAX_Q_LEN)] = 1
    """Most query tokens that a kernel is compiled for, causal among themselves; calls with more are extend attention."""
    softcap: Annotated[float, Limits(ge=0.0, le=1e6), UNSIGNED_ZERO] = 0.0
    """Scores become softcap * tanh(score / softcap), at least 0.001; 0 switches it off."""
    window: Annotated[int, Limits(gt=0, le=MAX_KV_LEN)] | None = None
    """Each query sees only the last `window` tokens, its own included."""
    sinks: bool = False
    """One learned logit per query head joins the softmax denominator (gpt-oss)."""

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    def problems(self) -> Iterable[rules.Problem]:
        """The rules of `rules.attention_problems`."""
        return rules.attention_problems(self)


class BoostSpec(Model):
    """Channels of a 2-bit K kept in 4 bits (Kitty)."""

    fraction: Annotated[float, Limits(ge=0.0, le=1.0), UNSIGNED_ZERO] = 0.0
    """Fraction of the channels that have 4 bits, in every group of tokens; a whole number of channels."""
    select: Literal["mean_abs", "range", "static"] = "mean_abs"
    """How boosted channels are chosen: largest mean |k|, largest max-min, or the first ones."""


class QuantSpec(Model):
    """How one of K and V is stored."""

    bits: Bits
    """Bits per element; 16 keeps `dtype`."""
    axis: Axis
    """channel: one scale per channel per `group` tokens. token: one scale per token per `group` channels."""
    group: Annotated[int, Limits(gt=0, le=MAX_GROUP)] = 128
    """Elements that share a scale."""
    zero: bool = True
    """Asymmetric (scale and zero) or symmetric (scale alone)."""

    @property
    def quantized(self) -> bool:
        """False where elements are kept in `dtype`."""
        return self.bits != 16

    @property
    def per_channel(self) -> bool:
        """Whether a group of tokens has a scale per channel."""
        return self.quantized and self.axis == "channel"


class KeySpec(QuantSpec):
    """How K is stored."""

    axis: Axis = "channel"
    boost: BoostSpec = BoostSpec.trusted()
    """Channels kept in 4 bits."""

    def boosted(self, head_dim: int) -> int:
        """Channels of a head that have 4 bits."""
        return round(self.boost.fraction * head_dim)

    def problems(self) -> Iterable[rules.Problem]:
        """The rules of `rules.key_problems`."""
        return rules.key_problems(self)


class ValueSpec(QuantSpec):
    """How V is stored."""

    axis: Axis = "token"


class CacheSpec(Model):
    """How the cache is laid out over a sequence."""

    layout: Literal["contiguous", "paged"] = "contiguous"
    """contiguous: one run of blocks per sequence. paged: pages found through a block table."""
    page: Annotated[int, Limits(gt=0, le=MAX_GROUP)] | None = None
    """Tokens per page; a multiple of 16 and of every group of tokens."""
    sink: Annotated[int, Limits(ge=0, le=MAX_GROUP)] = 0
    """First tokens kept in `dtype` for good."""
    local: Annotated[int, Limits(ge=0, le=MAX_GROUP)] = 0
    """Most recent tokens kept in `dtype`, K and V."""
    rollback: Annotated[int, Limits(ge=0, le=MAX_GROUP)] = 0
    """Most tokens that `KVCache.crop` may take back."""

    @property
    def unpacked(self) -> int:
        """Tokens of a sequence that no packed block holds, however long it is."""
        return self.sink + self.local

    def problems(self) -> Iterable[rules.Problem]:
        """The rules of `rules.cache_problems`."""
        return rules.cache_problems(self)


class Lengths(Model):
    """The lengths of a workload's sequences."""

    min: Annotated[int, Limits(gt=0, le=MAX_KV_LEN)] | None = None
    """Tokens of the shortest sequence, where lengths are unequal."""
    max: Annotated[int, Limits(gt=0, le=MAX_KV_LEN)] | None = field(default=None, compare=False)
    """Tokens of the longest: the workload's kv_len, which is also the default."""
    distribution: Literal["equal", "log_uniform"] = "log_uniform"
    """log_uniform: as many sequences in every doubling between min and kv_len."""


EQUAL = Lengths.trusted(distribution="equal")


class Workload(Model):
    """A shape of calls to tune for."""

    batch: Annotated[int, Limits(gt=0, le=MAX_BATCH)]
    """Sequences in a call."""
    kv_len: Annotated[int, Limits(gt=0, le=MAX_KV_LEN)]
    """Tokens per sequence, the new ones included; of the longest, where lengths are unequal."""
    q_len: Annotated[int, Limits(ge=1, le=MAX_Q_LEN)] = 1
    """Query tokens per sequence."""
    lengths: Annotated[Lengths, Step("before", _equal_lengths)] = EQUAL
    """equal: every sequence has kv_len tokens. A mapping with min: lengths between that and kv_len."""
    load: Literal["rested", "sustained"] = "rested"
    """rested: the GPU idles between calls, as between layers. sustained: it is busy without pauses, at its power limit."""
    weight: Annotated[float, Limits(ge=1e-6, le=1e6), UNSIGNED_ZERO] = 1.0
    """Weight in the geometric mean of times that selects the layout."""

    @property
    def shortest(self) -> int:
        """Tokens of the shortest sequence."""
        return self.kv_len if self.lengths.min is None else self.lengths.min

    @property
    def key(self) -> str:
        """Short name: batch x lengths, q_len if it is not 1, and the load if it is sustained. `traffic.parse` reads it."""
        lengths = f"{self.kv_len}" if self.shortest == self.kv_len else f"{self.shortest}-{self.kv_len}"
        query = f"q{self.q_len}" if self.q_len > 1 else ""
        return f"{self.batch}x{lengths}{query}" + (f":{self.load}" if self.load != "rested" else "")


class KernelSpec(Model):
    """A KV-cache format, the attention over it, and the shapes that matter."""

    name: Annotated[str, Limits(min_length=1, max_length=80, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "kernel"
    """Letters, digits, dots, dashes and underscores."""
    arch: Arch = "native"
    """Target; native is the first visible GPU, or the CPU."""
    attention: AttentionSpec
    """Heads and arithmetic."""
    key: KeySpec
    """How K is stored."""
    value: ValueSpec
    """How V is stored."""
    cache: CacheSpec = CacheSpec.trusted()
    """How the cache is laid out."""
    workloads: Annotated[
        tuple[Workload, ...], Limits(min_length=1, max_length=MAX_WORKLOADS, strict=False), Step("before", not_too_many)
    ] = (Workload.trusted(batch=1, kv_len=4096),)
    """Shapes to tune for."""

    def format(self) -> dict[str, Any]:
        """The part of a spec that decides the result: without name, arch and workloads.

        Fields without effect (the group of an unquantized operand, the selector without boost) are left out.
        """
        data = {name: value for name, value in self.to_json().items() if name in ("attention", "key", "value", "cache")}
        if self.key.boost.fraction == 0:
            del data["key"]["boost"]
        else:  # fractions that mean the same whole number of channels are one format
            data["key"]["boost"]["fraction"] = self.key.boosted(self.attention.head_dim) / self.attention.head_dim
        if self.cache.rollback == 0:
            del data["cache"]["rollback"]
        for operand in ("key", "value"):
            if data[operand]["bits"] == 16:
                data[operand] = {"bits": 16}
        return data

    @property
    def format_id(self) -> str:
        """Digest of `format()`."""
        return digest(self.format())

    def problems(self) -> Iterable[rules.Problem]:
        """The rules of `rules.kernel_problems`."""
        return rules.kernel_problems(self)
