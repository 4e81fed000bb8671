"""The spec language. It says what is computed and nothing about how.

Formats follow BitDecoding (K per channel, V per token), TurboMind and QServe (per token), PyTorch's INT4 GQA (per token,
several groups), Kitty (2-bit K with boosted channels, sink and local window), KIVI, and the INT8 per-channel paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs, InitErrorDetails, PydanticCustomError, SchemaSerializer, SchemaValidator
from typing_extensions import dataclass_transform

from kvgen.arch import Arch
from kvgen.digest import digest
from kvgen.spec import rules

MAX_KV_LEN = 1 << 24
MAX_BATCH = 1 << 16
MAX_GROUP = 1 << 16
MAX_Q_LEN = 1 << 16
MAX_WORKLOADS = 256
MAX_CHANNELS = 1 << 20
"""Of a matrix."""
MAX_ROWS = 128
"""Of a call of a linear layer."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Model:
    """A frozen pydantic dataclass: an unknown field is a mistake, and "4" is not a number.

    Constructing one with mistakes raises SpecError with all of them.
    """

    __pydantic_validator__: ClassVar[SchemaValidator]
    __pydantic_serializer__: ClassVar[SchemaSerializer]

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))(cls)
        validate: Any = cls.__init__

        def construct(self: Model, **fields: Any) -> None:
            try:
                validate(self, **fields)
            except ValidationError as error:
                from kvgen.errors import SpecError
                from kvgen.spec.issues import spec_issues

                raise SpecError(spec_issues(error, cls)) from None

        cls.__init__ = construct  # type: ignore[assignment, method-assign]

    def __post_init__(self) -> None:
        """Raises every problem as one of pydantic's errors, each at its own place."""
        details = [
            InitErrorDetails(type=PydanticCustomError(rules.KIND, "{reason}", {"reason": reason}), loc=place, input=None)
            for place, reason in self.problems()
        ]
        if details:
            raise ValidationError.from_exception_data(type(self).__name__, details)

    def problems(self) -> Iterable[rules.Problem]:
        """What does not hold between fields that are right by themselves."""
        return ()

    def to_json(self) -> dict[str, Any]:
        """Plain data with every field."""
        data: dict[str, Any] = self.__pydantic_serializer__.to_python(self)
        return data


def _integer(value: Any) -> Any:
    """4.0 and True equal integers in Python; a literal must not accept them."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise PydanticCustomError("int_type", "Input should be a valid integer")


def _group(value: Any) -> Any:
    """An integer, or `row`."""
    return value if value == "row" else _integer(value)


def _not_too_many(value: Any) -> Any:
    """pydantic looks at all items of a list that is too long, and keeps an error for each."""
    if isinstance(value, (list, tuple)) and len(value) > MAX_WORKLOADS:
        raise PydanticCustomError("too_many", f"at most {MAX_WORKLOADS} workloads, not {len(value)}")
    return value


def _equal_lengths(value: Any) -> Any:
    """`equal` in place of a mapping."""
    if isinstance(value, str) and value == "equal":
        return EQUAL
    if isinstance(value, (Mapping, Lengths)):
        return value
    from kvgen.spec.issues import shown

    raise PydanticCustomError("lengths", "must be equal, or a mapping with min, not {value}", {"value": shown(value)})


_UNSIGNED_ZERO = AfterValidator(lambda value: value + 0.0)
"""-0.0 equals 0.0, but is another text in JSON and so another digest."""
_SOME, _NOT_TOO_MANY = Field(min_length=1, max_length=MAX_WORKLOADS), BeforeValidator(_not_too_many)
Name = Annotated[StrictStr, Field(min_length=1, max_length=80, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
DType = Literal["float16", "bfloat16", "float32"]
Axis = Literal["channel", "token"]
Scale = Literal["dynamic", "tensor", "head", "channel"]
CodeType = Literal["int", "e4m3", "e5m2", "nvfp4", "mxfp4"]
_Bits = Annotated[Literal[2, 4, 8, 16], BeforeValidator(_integer)]
_Heads = Annotated[StrictInt, Field(gt=0, le=4096)]
_Tokens = Annotated[StrictInt, Field(gt=0, le=MAX_KV_LEN)]
_Queries = Annotated[StrictInt, Field(ge=1, le=MAX_Q_LEN)]
_Kept = Annotated[StrictInt, Field(ge=0, le=MAX_GROUP)]
_Group = Annotated[StrictInt, Field(gt=0, le=MAX_GROUP)]
_Weight = Annotated[StrictFloat, Field(ge=1e-6, le=1e6), _UNSIGNED_ZERO]


class AttentionSpec(Model):
    """Heads and arithmetic of the attention itself."""

    q_heads: _Heads
    """Query heads."""
    kv_heads: _Heads
    """Key/value heads; `q_heads` is a multiple of it (grouped-query attention)."""
    head_dim: Annotated[StrictInt, Field(gt=0, le=1024, multiple_of=16)]
    """Channels per head."""
    dtype: DType = "float16"
    """Type of q, new k and v, the residual and the output."""
    q_len: _Queries = 1
    """Most query tokens that a kernel is compiled for, causal among themselves; calls with more are extend attention."""
    softcap: Annotated[StrictFloat, Field(ge=0.0, le=1e6), _UNSIGNED_ZERO] = 0.0
    """Scores become softcap * tanh(score / softcap), at least 0.001; 0 switches it off."""
    window: _Tokens | None = None
    """Each query sees only the last `window` tokens, its own included."""
    sinks: StrictBool = False
    """One learned logit per query head joins the softmax denominator (gpt-oss)."""

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    def problems(self) -> Iterable[rules.Problem]:
        return rules.attention(self)


class BoostSpec(Model):
    """Channels of a 2-bit K kept in 4 bits (Kitty)."""

    fraction: Annotated[StrictFloat, Field(ge=0.0, le=1.0), _UNSIGNED_ZERO] = 0.0
    """Fraction of the channels that have 4 bits, in every group of tokens; a whole number of channels."""
    select: Literal["mean_abs", "range", "static"] = "mean_abs"
    """How boosted channels are chosen: largest mean |k|, largest max-min, or the first ones."""


def _rotation(value: Any) -> Any:
    """`hadamard` in place of a mapping."""
    if isinstance(value, str) and value == "hadamard":
        return RotateSpec()
    if value is None or isinstance(value, (Mapping, RotateSpec)):
        return value
    from kvgen.spec.issues import shown

    raise PydanticCustomError("rotation", "must be hadamard, or a mapping with block or signs, not {value}", {"value": shown(value)})


class RotateSpec(Model):
    """A normalized Walsh-Hadamard transform of a head's channels before they are stored (QuaRot, SAW-INT4; docs/numerics.md)."""

    block: Annotated[Literal[16, 32, 64, 128, 256], BeforeValidator(_integer)] | None = None
    """Channels that are mixed with each other; the largest block that divides head_dim, where it is not given."""
    signs: StrictBool = True
    """Whether channels are multiplied by fixed signs first, so that a common offset of all channels spreads too."""
    applied: Literal["kernel", "caller"] = "kernel"
    """kernel: queries and new tokens are rotated as they are read. caller: of K, they come rotated, as `kvgen.rotary` gives them."""

    def channels(self, head_dim: int) -> int:
        """The block for heads of `head_dim` channels."""
        return self.block or min(head_dim & -head_dim, 256)


class QuantSpec(Model):
    """How one of K and V is stored."""

    bits: _Bits
    """Bits per element; 16 keeps `dtype`. A float type has its own."""
    axis: Axis
    """channel: one scale per channel per `group` tokens. token: one scale per token per `group` channels."""
    group: _Group = 128
    """Elements that share a scale."""
    zero: StrictBool = True
    """Asymmetric (scale and zero) or symmetric (scale alone), as float types are."""
    rotate: Annotated[RotateSpec | None, BeforeValidator(_rotation)] = None
    """hadamard, or a mapping: tokens are rotated before they are stored, and the query or the output with them."""
    type: CodeType = "int"
    """Codes: integers, floats of 8 bits by their bits of exponent and mantissa, or floats of 4 bits by the name of their format."""
    scale: Scale = "dynamic"
    """dynamic: of each group, stored with it. tensor, head, channel: static ones, given with the cache, without groups and zeros; of nvfp4
    beside those of groups.
    """

    @model_validator(mode="before")
    @classmethod
    def _implied(cls, given: Any) -> Any:
        """What a float type and a static scale say about other fields."""
        fields = given.kwargs if isinstance(given, ArgsKwargs) else given
        if not isinstance(fields, Mapping):
            return given
        implied: dict[str, Any] = {} if fields.get("scale", "dynamic") == "dynamic" else {"zero": False}
        if fields.get("type", "int") != "int":
            implied |= rules.IMPLIED.get(str(fields["type"]), {"bits": 8})  # of an unknown type, that is the mistake
        if not implied:
            return given
        whole = {**implied, **fields}
        return ArgsKwargs(given.args, whole) if isinstance(given, ArgsKwargs) else whole

    @property
    def quantized(self) -> bool:
        """False where elements are kept in `dtype`."""
        return self.bits != 16

    @property
    def per_channel(self) -> bool:
        """Whether a group of tokens has a scale per channel."""
        return self.grouped and self.axis == "channel"

    @property
    def per_token(self) -> bool:
        """Whether a group of channels has a scale per token."""
        return self.grouped and self.axis == "token"

    @property
    def grouped(self) -> bool:
        """Whether blocks hold scales of groups, of nvfp4 beside a static one."""
        return self.quantized and (self.scale == "dynamic" or self.type in rules.TWO_LEVELS)

    @property
    def static(self) -> bool:
        """Whether scales are given with the cache."""
        return self.quantized and self.scale != "dynamic"

    def problems(self) -> Iterable[rules.Problem]:
        return rules.code_type(self)


class KeySpec(QuantSpec):
    """How K is stored."""

    axis: Axis = "channel"
    boost: BoostSpec = BoostSpec()
    """Channels kept in 4 bits."""

    def boosted(self, head_dim: int) -> int:
        """Channels of a head that have 4 bits."""
        return round(self.boost.fraction * head_dim)

    def problems(self) -> Iterable[rules.Problem]:
        yield from super().problems()
        yield from rules.key(self)


class ValueSpec(QuantSpec):
    """How V is stored."""

    axis: Axis = "token"


class CacheSpec(Model):
    """How the cache is laid out over a sequence."""

    layout: Literal["contiguous", "paged"] = "contiguous"
    """contiguous: one run of blocks per sequence. paged: pages found through a block table."""
    page: _Group | None = None
    """Tokens per page; a multiple of 16 and of every group of tokens."""
    sink: _Kept = 0
    """First tokens kept in `dtype` for good."""
    local: _Kept = 0
    """Most recent tokens kept in `dtype`, K and V."""
    rollback: _Kept = 0
    """Most tokens that `KVCache.crop` may take back."""
    quantize: Literal["block", "arrival"] = "block"
    """block: K and V of a block together, once it is full. arrival: every token when it is written; any number may be taken back."""

    @property
    def unpacked(self) -> int:
        """Tokens of a sequence that no packed block holds, however long it is."""
        return self.sink + self.local

    @property
    def arrival(self) -> bool:
        """Whether every token is quantized when it is written, so that none is kept in `dtype`."""
        return self.quantize == "arrival"

    def problems(self) -> Iterable[rules.Problem]:
        return rules.cache(self)


class Lengths(Model):
    """The lengths of a workload's sequences."""

    min: _Tokens | None = None
    """Tokens of the shortest sequence, where lengths are unequal."""
    max: _Tokens | None = field(default=None, compare=False)
    """Tokens of the longest: the workload's kv_len, which is also the default."""
    distribution: Literal["equal", "log_uniform"] = "log_uniform"
    """log_uniform: as many sequences in every doubling between min and kv_len."""


EQUAL = Lengths(distribution="equal")


class Workload(Model):
    """A shape of calls to tune for."""

    batch: Annotated[StrictInt, Field(gt=0, le=MAX_BATCH)]
    """Sequences in a call."""
    kv_len: _Tokens
    """Tokens per sequence, the new ones included; of the longest, where lengths are unequal."""
    q_len: _Queries = 1
    """Query tokens per sequence."""
    lengths: Annotated[Lengths, BeforeValidator(_equal_lengths)] = EQUAL
    """equal: every sequence has kv_len tokens. A mapping with min: lengths between that and kv_len."""
    load: Literal["rested", "sustained"] = "rested"
    """rested: the GPU idles between calls, as between layers. sustained: it is busy without pauses, at its power limit."""
    weight: _Weight = 1.0
    """Weight in the geometric mean of times that selects the layout."""

    @property
    def numbers(self) -> dict[str, int]:
        """The shape by the names that search spaces know it by."""
        return {"batch": self.batch, "kv_len": self.kv_len, "q_len": self.q_len}

    @property
    def shortest(self) -> int:
        """Tokens of the shortest sequence."""
        return self.kv_len if self.lengths.min is None else self.lengths.min

    @property
    def key(self) -> str:
        """Short name: batch x lengths, q_len if it is not 1, and the load if it is sustained. `workloads.parse` reads it."""
        lengths = f"{self.kv_len}" if self.shortest == self.kv_len else f"{self.shortest}-{self.kv_len}"
        query = f"q{self.q_len}" if self.q_len > 1 else ""
        return f"{self.batch}x{lengths}{query}" + (f":{self.load}" if self.load != "rested" else "")


class Spec(Model):
    """Of any operation."""

    def format(self) -> dict[str, Any]:
        """The part of a spec that decides the result: without name, arch and workloads."""
        return {name: value for name, value in self.to_json().items() if name not in ("name", "arch", "workloads")}

    @property
    def format_id(self) -> str:
        """Digest of `format()`."""
        return digest(self.format())


class KernelSpec(Spec):
    """A KV-cache format, the attention over it, and the shapes that matter."""

    name: Name = "kernel"
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
    workloads: Annotated[tuple[Workload, ...], _SOME, _NOT_TOO_MANY] = (Workload(batch=1, kv_len=4096),)
    """Shapes to tune for."""

    def format(self) -> dict[str, Any]:
        """The part of a spec that decides the result.

        Fields without effect (the group of an unquantized operand, the selector without boost) are left out.
        """
        data = super().format()
        if self.key.boost.fraction == 0:
            del data["key"]["boost"]
        else:  # fractions that mean the same whole number of channels are one format
            data["key"]["boost"]["fraction"] = self.key.boosted(self.attention.head_dim) / self.attention.head_dim
        if self.cache.rollback == 0:
            del data["cache"]["rollback"]
        if not self.cache.arrival:
            del data["cache"]["quantize"]
        for operand, quant in (("key", self.key), ("value", self.value)):
            if quant.rotate is None:
                del data[operand]["rotate"]
            else:
                data[operand]["rotate"]["block"] = quant.rotate.channels(self.attention.head_dim)
                if quant.rotate.applied == "kernel":
                    del data[operand]["rotate"]["applied"]
            if data[operand]["bits"] == 16:
                data[operand] = {"bits": 16}
                continue
            if data[operand]["type"] == "int":
                del data[operand]["type"]
            for without in ("axis", "group") if not quant.grouped else () if quant.static else ("scale",):
                del data[operand][without]
        return data

    def problems(self) -> Iterable[rules.Problem]:
        return rules.kernel(self)


class MatrixFormat(Model):
    """A matrix and its codes: q = round(x / scale) with scale = max |x| / 127 of the channel (docs/matrix.md)."""

    dtype: DType = "float32"
    """Type of the matrix; scales are float32."""
    bits: Annotated[Literal[8], BeforeValidator(_integer)] = 8
    """Bits per code."""
    axis: Literal["channel"] = "channel"
    """channel: one scale per channel, over all tokens."""


class MatrixShape(Model):
    """A shape of matrices to tune for."""

    tokens: _Tokens
    """Rows."""
    channels: Annotated[StrictInt, Field(gt=0, le=MAX_CHANNELS)]
    """Columns."""
    weight: _Weight = 1.0
    """Weight in the geometric mean of times that a winner is judged by."""

    @property
    def key(self) -> str:
        """Short name: tokens x channels."""
        return f"{self.tokens}x{self.channels}"

    @property
    def numbers(self) -> dict[str, int]:
        """The shape by the names that search spaces know it by."""
        return {"tokens": self.tokens, "channels": self.channels}

    @property
    def elements(self) -> int:
        """Elements of the matrix."""
        return self.tokens * self.channels


class MatrixSpec(Spec):
    """An operation on a matrix, its format, and the shapes that matter."""

    name: Name = "matrix"
    """Letters, digits, dots, dashes and underscores."""
    operation: Literal["quantize", "dequantize"]
    """The call that is timed: quantize (codes by given scales) or dequantize. Every kernel has both, and computes scales."""
    arch: Arch = "native"
    """Target; native is the first visible GPU, or the CPU."""
    matrix: MatrixFormat = MatrixFormat()
    """Type and codes."""
    workloads: Annotated[tuple[MatrixShape, ...], _SOME, _NOT_TOO_MANY] = (MatrixShape(tokens=131072, channels=1024),)
    """Shapes to tune for."""

    def problems(self) -> Iterable[rules.Problem]:
        return rules.listed_twice(self.workloads)


class LinearFormat(Model):
    """A linear layer y = x W^T over quantized weights W = scale (code - zero) (docs/linear.md)."""

    n: Annotated[StrictInt, Field(gt=0, le=MAX_CHANNELS, multiple_of=16)]
    """Rows of W: features of the output; with silu_mul those of the gate and then as many of the up projection."""
    k: Annotated[StrictInt, Field(gt=0, le=MAX_CHANNELS, multiple_of=64)]
    """Columns of W: features of the input; a multiple of `group`."""
    bits: Annotated[Literal[4, 8], BeforeValidator(_integer)] = 4
    """Bits per code."""
    group: Annotated[Literal[64, 128, "row"], BeforeValidator(_group)] = 128
    """Columns of a row of W that share a scale; row: all of them."""
    zero: StrictBool = False
    """Whether every scale has a zero of its own, an unsigned code; otherwise zeros are 8 (of 8 bits: 128)."""
    dtype: DType = "float16"
    """Type of x, y, bias and residual, and of the scales; float32 on a CPU alone."""
    bias: StrictBool = False
    """Whether a call takes a bias [n], which is added to the product."""
    epilogue: Literal["none", "silu_mul", "add"] = "none"
    """silu_mul: y = silu(gate) * up, of n / 2 features. add: a residual like y is added."""

    @property
    def features(self) -> int:
        """Columns of the output."""
        return self.n // 2 if self.epilogue == "silu_mul" else self.n

    @property
    def groups(self) -> int:
        """Scales of a row of W."""
        return 1 if self.group == "row" else self.k // self.group

    def problems(self) -> Iterable[rules.Problem]:
        return rules.linear(self)


class LinearShape(Model):
    """A number of rows to tune for."""

    rows: Annotated[StrictInt, Field(gt=0, le=MAX_ROWS)]
    """Rows of x: tokens of a step."""
    weight: _Weight = 1.0
    """Weight in the geometric mean of times that a winner is judged by."""

    @property
    def key(self) -> str:
        """Short name. `workloads.parse_rows` reads it."""
        return f"rows{self.rows}"

    @property
    def numbers(self) -> dict[str, int]:
        """The shape by the names that search spaces know it by."""
        return {"m": self.rows}


class LinearSpec(Spec):
    """A linear layer over quantized weights, and the numbers of rows that matter."""

    name: Name = "linear"
    """Letters, digits, dots, dashes and underscores."""
    operation: Literal["linear"] = "linear"
    """Only linear."""
    arch: Arch = "native"
    """Target; native is the first visible GPU, or the CPU."""
    linear: LinearFormat
    """Shape and format of the weights, and what is computed beside the product."""
    workloads: Annotated[tuple[LinearShape, ...], _SOME, _NOT_TOO_MANY] = tuple(
        LinearShape(rows=rows) for rows in (1, 4, 8, 16, 32, 64, 128)
    )
    """Numbers of rows to tune for. A kernel takes any number up to the largest."""

    def problems(self) -> Iterable[rules.Problem]:
        return rules.listed_twice(self.workloads)


AnySpec = KernelSpec | MatrixSpec | LinearSpec
AnyWorkload = Workload | MatrixShape | LinearShape
OPERATIONS: dict[str, type[MatrixSpec] | type[LinearSpec]] = {"quantize": MatrixSpec, "dequantize": MatrixSpec, "linear": LinearSpec}
"""Kinds of specs by their `operation`; a spec without it is one of attention."""
