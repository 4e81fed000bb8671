"""Formats for a model, within a budget of memory or of quality: those on the Pareto front of a table, with their entries."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvgen import _resources
from kvgen.accuracy.pareto import bits, front
from kvgen.accuracy.row import Row, longest, read_csv
from kvgen.accuracy.suite import formats
from kvgen.accuracy.times import entry_times
from kvgen.errors import KvgenError, SpecError
from kvgen.format.sizes import bits_per_element, token_bytes
from kvgen.registry import stores
from kvgen.registry.entry import Entry
from kvgen.spec import KernelSpec, dump_spec
from kvgen.spec.layers import MODELS, Config, Layers, known_config, layer_specs, layers_of, spec_name


@dataclass(frozen=True)
class Model:
    """A model by its configuration."""

    name: str
    config: Config
    layers: Layers

    @classmethod
    def named(cls, text: str) -> Model:
        """The model of a name, a `config.json` or its folder, or a shape. Raises as `known_config` and `layers_of` do."""
        config = known_config(text)
        layers = layers_of(config)
        path = Path(text).resolve()
        if text.lower() in MODELS or not path.exists():
            name = text.lower()
        elif path.is_dir() or path.name == "config.json":
            name = (path if path.is_dir() else path.parent).name
        else:
            name = layers.model_type
        return cls(spec_name(name), config, layers)

    def parts(self, name: str, dtype: str | None = None) -> list[Part]:
        """The specs of its layers in a format of the suite. `dtype` replaces the configuration's; float16 where neither says one.

        Raises SpecError where a kind of layer cannot have the format.
        """
        form = {**formats()[name], "name": name}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            specs = layer_specs({**self.config, **({"dtype": dtype} if dtype else {})}, form)
        notes = tuple(dict.fromkeys(str(one.message) for one in caught))
        kinds = list(dict.fromkeys(zip(self.layers.kinds, specs, strict=True)))
        parts = []
        for number, (kind, spec) in enumerate(kinds):
            short = kind.removesuffix("_attention")
            alike = [other for other, _ in kinds].count(kind)
            ending = "" if len(kinds) == 1 else f"-{short}" if alike == 1 else f"-{short}-{number}"
            whole = spec_name(f"{self.name[: 78 - len(name) - len(ending)]}-{name}{ending}")
            parts.append(Part(kind, specs.count(spec), replace(spec, name=whole), notes))
        return parts


@dataclass(frozen=True)
class Part:
    """The layers of a model that have one spec."""

    kind: str
    layers: int
    spec: KernelSpec
    notes: tuple[str, ...]
    """Where the spec is not what the format's name says."""

    def to_yaml(self, model: Model) -> str:
        """The spec, below comments that say for which layers it is and what it does not hold."""
        told = [f"{self.layers} of {len(model.layers.kinds)} layers of {model.name} ({self.kind})", *self.notes]
        if (scale := model.layers.scale) is not None:
            told.append(f"the model multiplies scores by {scale:.9g}, which is an argument of calls: kernel.decode(..., scale={scale:.9g})")
        return "".join(f"# {line}\n" for line in told) + dump_spec(self.spec)


@dataclass(frozen=True)
class Option:
    """A format on the front, for one model."""

    row: Row
    parts: tuple[Part, ...]
    bits: float
    """Per element for this model's heads."""
    token_bytes: float
    """Of a packed token, in all layers."""
    unquantized_tokens: int
    """Sink and local tokens of every sequence, which are kept in 16 bits."""
    entries: tuple[Entry, ...]
    """Registered winners of exactly the formats of its specs."""
    step_us: tuple[float | None, ...]
    """By part, attention at 8 x 32768 in one layer, as an entry of exactly this format and these heads was measured on a GPU."""

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
            "step_us": list(self.step_us),
            "specs": [{"kind": part.kind, "layers": part.layers, "notes": part.notes, "spec": part.spec.to_json()} for part in self.parts],
        }


def results() -> Path:
    """The table that ships: that of a GPU's model if there is one, else that of the small one. Raises KvgenError if there is none."""
    found = [file for name in ("h200.csv", "cpu.csv") if (file := _resources.accuracy() / name).is_file()]
    if not found:
        raise KvgenError("this installation has no table of accuracy: make one with `kvgen accuracy --csv FILE`, and give it as --table")
    return found[0]


def options(
    model: Model, rows: Iterable[Row], *, budget: float | None = None, increase: float | None = None, dtype: str | None = None
) -> list[Option]:
    """The formats on the front of size and quality that fit: `budget` in bytes per token, `increase` of perplexity as a fraction.

    Smallest first. Rows of formats that are not in the suite, or that a layer of the model cannot have, are passed over.
    """
    fitting = {row.name: row for row in longest(rows) if row.name in formats() and not refused(model, row.name)}
    every = [_option(row, model, dtype) for row in front(fitting.values(), bits)]
    return [
        option
        for option in every
        if (budget is None or option.token_bytes <= budget) and (increase is None or option.worst_increase <= increase)
    ]


def refused(model: Model, name: str) -> str | None:
    """Why a layer of the model cannot have a format of the suite; None where all can."""
    try:
        model.parts(name)
    except SpecError as error:
        return "; ".join(f"{issue.path}: {issue.message}" for issue in error.issues)
    return None


def best(found: list[Option], budget: float | None) -> Option:
    """With a budget of memory the one of the best quality within it, else the smallest."""
    return found[-1] if budget is not None else found[0]


def _option(row: Row, model: Model, dtype: str | None) -> Option:
    parts = tuple(model.parts(row.name, dtype))
    entries = tuple(one.entry for store in stores() for part in parts for one in store.find(part.spec) if one.entry is not None)
    size = sum(token_bytes(part.spec, part.layers) for part in parts)
    width = sum(bits_per_element(part.spec) * part.layers for part in parts) / sum(part.layers for part in parts)
    times = entry_times({part.spec.name: part.spec for part in parts})
    step_us = tuple(times.get(part.spec.name) for part in parts)
    return Option(row, parts, width, size, parts[0].spec.cache.unpacked, entries, step_us)


__all__ = ["Model", "Option", "Part", "best", "options", "read_csv", "refused", "results"]
