"""The spec language. It says what is computed and nothing about how.

Formats follow BitDecoding (K per channel, V per token), TurboMind and QServe (per token), PyTorch's INT4 GQA (per token,
several groups), Kitty (2-bit K with boosted channels, sink and local window), KIVI, and the INT8 per-channel paper.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from kvgen.arch import Arch
from kvgen.digest import digest
from kvgen.spec import rules


def _integer(value: Any) -> Any:
    """4.0 and True equal integers in Python; a literal must not accept them."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise PydanticCustomError("int_type", "Input should be a valid integer")


def _without_sign(value: float) -> float:
    """-0.0 equals 0.0, but is another text in JSON and so another digest."""
    return value + 0.0


def _not_too_many(value: Any) -> Any:
    """pydantic looks at all items of a list that is too long, and keeps an error for each."""
    if isinstance(value, (list, tuple)) and len(value) > MAX_WORKLOADS:
        raise PydanticCustomError("too_many", f"at most {MAX_WORKLOADS} workloads, not {len(value)}")
    return value


Axis = Literal["channel", "token"]
Bits = Annotated[Literal[2, 4, 8, 16], BeforeValidator(_integer, json_schema_input_type=Literal[2, 4, 8, 16])]
Number = Annotated[float, AfterValidator(_without_sign)]
DType = Literal["float16", "bfloat16", "float32"]

MAX_KV_LEN = 1 << 24
MAX_BATCH = 1 << 16
MAX_GROUP = 1 << 16
MAX_WORKLOADS = 256

RULE = "rule"
"""Type of pydantic's errors for what does not hold between fields that are right by themselves."""


class Model(BaseModel):
    """Frozen and strict: an unknown field is a mistake, and "4" is not a number.

    Constructing one with mistakes raises SpecError with all of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            from kvgen.spec.issues import spec_error

            raise spec_error(error, type(self)) from None

    # pydantic may fill nested models without this constructor, so that all mistakes come together
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


def _refuse(title: str, problems: Iterable[rules.Problem]) -> None:
    """Raise all problems of a model as one pydantic error, each at its own place."""
    details = [
        InitErrorDetails(type=PydanticCustomError(RULE, "{reason}", {"reason": reason}), loc=place, input=None)
        for place, reason in problems
    ]
    if details:
        raise ValidationError.from_exception_data(title, details)


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
    """Most query tokens that a kernel is compiled for, causal among themselves; calls with more are extend attention."""
    softcap: Number = Field(default=0.0, ge=0.0, le=1e6)
    """Scores become softcap * tanh(score / softcap), at least 0.001; 0 switches it off."""
    window: int | None = Field(default=None, gt=0, le=MAX_KV_LEN)
    """Each query sees only the last `window` tokens, its own included."""
    sinks: bool = False
    """One learned logit per query head joins the softmax denominator (gpt-oss)."""

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @model_validator(mode="after")
    def _consistent(self) -> AttentionSpec:
        _refuse("attention", rules.attention_problems(self))
        return self


class BoostSpec(Model):
    """Channels of a 2-bit K kept in 4 bits (Kitty)."""

    fraction: Number = Field(default=0.0, ge=0.0, le=1.0)
    """Share of channels per group that gets 4 bits."""
    select: Literal["mean_abs", "range", "static"] = "mean_abs"
    """How boosted channels are chosen: largest mean |k|, largest max-min, or the first ones."""


class QuantSpec(Model):
    """How one of K and V is stored."""

    bits: Bits
    """Bits per element; 16 keeps `dtype`."""
    axis: Axis
    """channel: one scale per channel per `group` tokens. token: one scale per token per `group` channels."""
    group: int = Field(default=128, gt=0, le=MAX_GROUP)
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
    boost: BoostSpec = BoostSpec()
    """Channels kept in 4 bits."""

    def boosted(self, head_dim: int) -> int:
        """Channels of a head that have 4 bits."""
        return round(self.boost.fraction * head_dim)

    @model_validator(mode="after")
    def _consistent(self) -> KeySpec:
        _refuse("key", rules.key_problems(self))
        return self


class ValueSpec(QuantSpec):
    """How V is stored."""

    axis: Axis = "token"


class CacheSpec(Model):
    """How the cache is laid out over a sequence."""

    layout: Literal["contiguous", "paged"] = "contiguous"
    """contiguous: one run of blocks per sequence. paged: pages found through a block table."""
    page: int | None = Field(default=None, gt=0, le=MAX_GROUP)
    """Tokens per page; a multiple of the residual block."""
    sink: int = Field(default=0, ge=0, le=MAX_GROUP)
    """First tokens kept in `dtype` for good."""
    local: int = Field(default=0, ge=0, le=MAX_GROUP)
    """Most recent tokens kept in `dtype`, K and V."""
    rollback: int = Field(default=0, ge=0, le=MAX_GROUP)
    """Most tokens that `KVCache.crop` may take back."""

    @property
    def unpacked(self) -> int:
        """Tokens of a sequence that no packed block holds, however long it is."""
        return self.sink + self.local

    @model_validator(mode="after")
    def _consistent(self) -> CacheSpec:
        _refuse("cache", rules.cache_problems(self))
        return self


class Workload(Model):
    """A shape that a variant is tuned for."""

    batch: int = Field(gt=0, le=MAX_BATCH)
    """Sequences in a call."""
    kv_len: int = Field(gt=0, le=MAX_KV_LEN)
    """Tokens per sequence, the new ones included."""
    q_len: int = Field(default=1, ge=1, le=65536)
    """Query tokens per sequence."""
    weight: Number = Field(default=1.0, ge=1e-6, le=1e6)
    """Share in the geometric mean that picks the layout."""

    @property
    def key(self) -> str:
        """Short name: batch x kv_len, and q_len if it is not 1."""
        return f"{self.batch}x{self.kv_len}" + (f"q{self.q_len}" if self.q_len > 1 else "")


class KernelSpec(Model):
    """A KV-cache format, the attention over it, and the shapes that matter."""

    name: str = Field(default="kernel", min_length=1, max_length=80, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Letters, digits, dots, dashes and underscores."""
    arch: Arch = "native"
    """Target; native is the first visible GPU, or the CPU."""
    attention: AttentionSpec
    """Heads and arithmetic."""
    key: KeySpec
    """How K is stored."""
    value: ValueSpec
    """How V is stored."""
    cache: CacheSpec = CacheSpec()
    """How the cache is laid out."""
    workloads: Annotated[tuple[Workload, ...], BeforeValidator(_not_too_many)] = Field(
        default=(Workload(batch=1, kv_len=4096),), min_length=1, max_length=MAX_WORKLOADS, strict=False
    )
    """Shapes to tune for."""

    def format(self) -> dict[str, Any]:
        """The part of a spec that decides the result: without name, arch and workloads.

        Fields without effect (the group of an unquantized operand, the selector without boost) are left out.
        """
        data = self.model_dump(mode="json", include={"attention", "key", "value", "cache"})
        if self.key.boost.fraction == 0:
            del data["key"]["boost"]
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

    @model_validator(mode="after")
    def _consistent(self) -> KernelSpec:
        _refuse("spec", rules.kernel_problems(self))
        return self
