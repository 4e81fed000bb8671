"""What back ends refuse, each by name and reason: those of both GPU back ends, and how any is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvgen.arch import Target
from kvgen.spec import KernelSpec, QuantSpec

MAX_QUERIES = 8
MAX_Q_ROWS = 128
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Refusal:
    """A feature of the spec language that is not built. `reason` may name fields of the spec in {braces}."""

    feature: str
    applies: Callable[[KernelSpec], bool]
    reason: str

    def text(self, spec: KernelSpec) -> str:
        """The reason with the spec's own values."""
        return self.reason.format(a=spec.attention, k=spec.key, v=spec.value, c=spec.cache)


def first_refusal(refusals: Iterable[Refusal], spec: KernelSpec) -> str | None:
    """The reason of the first refusal that applies to a spec, or None."""
    return next((refusal.text(spec) for refusal in refusals if refusal.applies(spec)), None)


def wrong_target(targets: Iterable[Target], target: Target) -> str | None:
    """Why a back end for some targets has no code for `target`, or None."""
    known = tuple(targets)
    return None if target in known else f"it lowers for {', '.join(known)}, not for {target}"


def either(numbers: Sequence[int]) -> str:
    """Numbers as a sentence lists them: "16, 32 or 64"."""
    return ", ".join(map(str, numbers[:-1])) + f" or {numbers[-1]}"


def narrow_token_group(quant: QuantSpec, channels: int) -> bool:
    """Whether groups of channels are no multiple of `channels`."""
    return quant.quantized and quant.axis == "token" and quant.group % channels != 0


GPU_REFUSALS: tuple[Refusal, ...] = (
    Refusal("float32", lambda s: s.attention.dtype == "float32", "attention.dtype is float32, and matrix instructions take 16 bits"),
    Refusal(
        f"head_dim above {MAX_HEAD_DIM}",
        lambda s: s.attention.head_dim > MAX_HEAD_DIM,
        f"attention.head_dim ({{a.head_dim}}) is more than {MAX_HEAD_DIM}, for which registers suffice",
    ),
    Refusal(
        f"attention.q_len above {MAX_QUERIES} (longer calls need none: extend attention)",
        lambda s: s.attention.q_len > MAX_QUERIES,
        f"attention.q_len ({{a.q_len}}) is more than {MAX_QUERIES}, which a decode kernel holds at once; longer calls need no q_len",
    ),
    Refusal(
        "K per token in groups that are no multiple of 16 channels",
        lambda s: narrow_token_group(s.key, 16),
        "key.group ({k.group} channels) must be a multiple of 16",
    ),
    Refusal(
        "V per token in groups that are no multiple of 16 channels",
        lambda s: narrow_token_group(s.value, 16),
        "value.group ({v.group} channels) must be a multiple of 16",
    ),
    Refusal(
        f"more than {MAX_Q_ROWS} query heads times query tokens per KV head",
        lambda s: s.attention.group * s.attention.q_len > MAX_Q_ROWS,
        f"{{a.group}} query heads times {{a.q_len}} query tokens share a KV head, more than {MAX_Q_ROWS} rows",
    ),
)
