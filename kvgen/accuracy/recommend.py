"""Formats for a model, within a budget of memory or of quality: those on the Pareto front of a table, with their entries."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgen import _resources
from kvgen.accuracy.pareto import bits, front
from kvgen.accuracy.row import Row, longest, read_csv
from kvgen.accuracy.suite import suite
from kvgen.errors import KvgenError
from kvgen.reference.sizes import bits_per_element, token_bytes
from kvgen.registry import stores
from kvgen.registry.entry import Entry
from kvgen.spec import KernelSpec, load_spec
from kvgen.spec.model import DType


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides the size of its cache."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int


MODELS = {
    "llama-2-7b": ModelShape(32, 32, 32, 128),
    "llama-3.1-8b": ModelShape(32, 32, 8, 128),
    "llama-3.1-70b": ModelShape(80, 64, 8, 128),
    "mistral-7b": ModelShape(32, 32, 8, 128),
    "qwen3-8b": ModelShape(36, 32, 8, 128),
    "qwen3-14b": ModelShape(40, 40, 8, 128),
    "qwen3-32b": ModelShape(64, 64, 8, 128),
    "gpt-oss-20b": ModelShape(24, 64, 8, 64),
    "gpt-oss-120b": ModelShape(36, 64, 8, 64),
}
"""Models by name. Of gpt-oss, half of the layers have a window, which this does not know: it counts them as full."""


@dataclass(frozen=True)
class Option:
    """A format on the front, for one model."""

    row: Row
    spec: KernelSpec
    bits: float
    """Per element for this model's heads."""
    token_bytes: float
    """Of a packed token, in all layers."""
    unquantized_tokens: int
    """Sink and local tokens of every sequence, which are kept in 16 bits."""
    entries: tuple[Entry, ...]
    """Registered winners of exactly this spec's format."""

    @property
    def worst_increase(self) -> float:
        """Rise of perplexity and two standard errors of it, so that chance does not decide."""
        return self.row.increase + 2 * self.row.increase_error

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            **self.row.to_json(),
            "bits": self.bits,
            "bytes_per_token": self.token_bytes,
            "unquantized_tokens": self.unquantized_tokens,
            "entries": [{"key": entry.key, "device": entry.device.get("name"), "standings": entry.standings()} for entry in self.entries],
            "spec": self.spec.to_json(),
        }


def model_shape(text: str) -> ModelShape:
    """A model's name, or LAYERSxQ_HEADS/KV_HEADSxHEAD_DIM. Raises KvgenError, SpecError for what is neither."""
    known = MODELS.get(text.lower())
    if known is not None:
        return known
    match = re.fullmatch(r"(\d{1,4})x(\d{1,4})/(\d{1,4})x(\d{1,4})", text)
    if match is None or not int(match[1]):
        raise KvgenError(
            f"{text!r} is no model shape: write layers x query heads / KV heads x head_dim, like 32x32/8x128, or one of {', '.join(MODELS)}"
        )
    return ModelShape(*map(int, match.groups()))


def spec_for(name: str, shape: ModelShape, dtype: DType) -> KernelSpec:
    """A format of the suite with a model's heads; groups of channels are no larger than a head. Raises SpecError where that is no spec."""
    fields = suite()[name].to_json()
    for operand in ("key", "value"):
        if fields[operand]["axis"] == "token":
            fields[operand]["group"] = min(fields[operand]["group"], shape.head_dim)
    heads = {"q_heads": shape.q_heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "dtype": dtype}
    return load_spec({"name": name, "attention": heads, **{part: fields[part] for part in ("key", "value", "cache")}})


def results() -> Path:
    """The table that ships: that of a GPU's model if there is one, else that of the small one. Raises KvgenError if there is none."""
    found = [file for name in ("h200.csv", "cpu.csv") if (file := _resources.accuracy() / name).is_file()]
    if not found:
        raise KvgenError("this installation has no table of accuracy: make one with `kvgen accuracy --csv FILE`, and give it as --table")
    return found[0]


def options(
    shape: ModelShape, rows: Iterable[Row], *, budget: float | None = None, increase: float | None = None, dtype: DType = "float16"
) -> list[Option]:
    """The formats on the front of size and quality that fit: `budget` in bytes per token, `increase` of perplexity as a fraction.

    Smallest first. Rows of formats that are not in the suite are passed over.
    """
    known = [row for row in longest(rows) if row.name in suite()]
    every = [_option(row, shape, dtype) for row in front(known, bits)]
    return [
        option
        for option in every
        if (budget is None or option.token_bytes <= budget) and (increase is None or option.worst_increase <= increase)
    ]


def best(found: list[Option], budget: float | None) -> Option:
    """With a budget of memory the one of the best quality within it, else the smallest."""
    return found[-1] if budget is not None else found[0]


def _option(row: Row, shape: ModelShape, dtype: DType) -> Option:
    spec = spec_for(row.name, shape, dtype)
    entries = tuple(one.entry for store in stores() for one in store.find(spec) if one.entry is not None)
    return Option(row, spec, bits_per_element(spec), token_bytes(spec, shape.layers), spec.cache.unpacked, entries)


__all__ = ["MODELS", "ModelShape", "Option", "best", "model_shape", "options", "read_csv", "results", "spec_for"]
