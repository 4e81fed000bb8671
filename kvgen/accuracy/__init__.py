"""The formats that are compared, the table of what they cost SmolLM2-135M, and those that fit a model: that no other one beats in size and
quality.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgen.errors import SpecError
from kvgen.format.sizes import bits_per_element, token_bytes
from kvgen.spec import KernelSpec, dump_spec, presets
from kvgen.spec.layers import MODELS, Config, Layers, known_config, layer_specs, layers_of, spec_name

if TYPE_CHECKING:
    import pandas as pd

SAME_AS = {"qserve-int8": "turbomind-int8", "qserve-int4": "turbomind-int4", "int4-gqa-rowwise": "turbomind-int4"}
"""Presets that store the same codes as another one, but for the type of what is not quantized."""
SHIPPED = Path(__file__).with_name("formats.csv")
"""`kvgen accuracy --csv` of all formats."""
BESIDE_WEIGHTS = ("16-bit", "k8v8", "bitdecoding-int4")
"""The formats of caches that a table of weights has: with 16, 8 and 4 bits."""
SHORT = ("k8v8", "bitdecoding-int4", "turbomind-int4", "saw-int4", "k4v2", "k2v4", "kitty")
"""The formats of a CPU's table, which is made in minutes."""


@cache
def formats() -> dict[str, dict[str, Any]]:
    """Formats by name, as mappings without heads for `layer_specs`: the presets, and what a paper or a choice is compared by."""

    def bits(key: int, value: int) -> dict[str, Any]:
        return {"key": {"bits": key}, "value": {"bits": value}}

    int4, groups = {"preset": "bitdecoding-int4"}, {"key": {"group": 32}, "value": {"group": 32}}
    return {
        "16-bit": {"key": {"bits": 16, "axis": "channel"}, "value": {"bits": 16, "axis": "token"}},
        **{name: {"preset": name} for name in presets() if name not in SAME_AS},
        **{f"k{key}v{value}": {**int4, **bits(key, value)} for key, value in ((8, 8), (8, 4), (4, 2), (2, 4))},
        "int4-groups-of-32": {**int4, **groups},
        "fp8-e5m2": {"preset": "fp8-e4m3", "key": {"type": "e5m2"}, "value": {"type": "e5m2"}},
        "e4m3-keys-int4-values": {"preset": "fp8-e4m3", "value": {"type": "int", "bits": 4, "zero": True}},
        "fp8-e4m3-static": {name: {"type": "e4m3", "scale": "tensor"} for name in ("key", "value")},
        "int8-static-channels": {name: {"bits": 8, "scale": "channel"} for name in ("key", "value")},
        "int4-rotated-keys": {**int4, "key": {"rotate": "hadamard"}},
        "turbomind-int4-rotated": {"preset": "turbomind-int4", "key": {"rotate": "hadamard"}, "value": {"rotate": "hadamard"}},
        "int4-ends-8": {**int4, "ends": {"layers": 2, **bits(8, 8)}},
        "kitty-static": {"preset": "kitty", "key": {"boost": {"select": "static"}}},
        "kitty-no-boost": {"preset": "kitty", "key": {"boost": {"fraction": 0.0}}},
        "kitty-no-window": {"preset": "kitty", "cache": {"sink": 0, "local": 0}},
    }


def weight_formats() -> dict[str, dict[str, Any]]:
    """Formats of weights by name: arguments of `quantize_weights`. The head keeps 16 bits where the name does not mention it."""
    int4, int8 = {"bits": 4, "group": 64}, {"bits": 8, "group": 64}
    return {
        "int8": {"spec": int8},
        "int8-rows": {"spec": {**int8, "group": "row"}},
        "int4": {"spec": int4},
        "int4-mse": {"spec": int4, "clip": "mse"},
        "int4-zeros": {"spec": {**int4, "zero": True}},
        "int4-zeros-mse": {"spec": {**int4, "zero": True}, "clip": "mse"},
        "int4-128": {"spec": {**int4, "group": 128}},
        "int4-head8": {"spec": int4, "head": int8},
    }


def read_table() -> pd.DataFrame:
    """The table that ships, by format: its measures (`evaluate.MEASURES` and `RETRIEVAL`) at the longest context, over all texts."""
    import pandas as pd

    found = pd.read_csv(SHIPPED)
    return found[(found.text == "all") & (found.context == found.context.max())].pivot(index="format", columns="measure", values="value")


# --- for a model ---------------------------------------------------------------------------------------------------------


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
        """The specs of its layers in a format by name. `dtype` replaces the configuration's; float16 where neither says one.

        Raises SpecError where a kind of layer cannot have the format, ValueError where the model has too few layers for it.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            specs = layer_specs({**self.config, **({"dtype": dtype} if dtype else {})}, {**formats()[name], "name": name})
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

    def refused(self, name: str) -> str | None:
        """Why a layer cannot have a format; None where all can."""
        try:
            self.parts(name)
        except SpecError as error:
            return "; ".join(f"{issue.path}: {issue.message}" for issue in error.issues)
        except ValueError as error:  # fewer layers than the format's ends
            return str(error)
        return None


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
    """A format that fits a model."""

    name: str
    parts: tuple[Part, ...]
    token_bytes: float
    """Of a packed token, in all layers."""
    quality: dict[str, float]
    """What it costs SmolLM2-135M, by measure of the table."""

    @property
    def bits(self) -> float:
        """Per element for this model's heads."""
        return sum(bits_per_element(part.spec) * part.layers for part in self.parts) / sum(part.layers for part in self.parts)

    @property
    def unquantized_tokens(self) -> int:
        """Sink and local tokens of every sequence, which are kept in 16 bits."""
        return self.parts[0].spec.cache.unpacked

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        specs = [{"kind": part.kind, "layers": part.layers, "notes": part.notes, "spec": part.spec.to_json()} for part in self.parts]
        sizes = {"bits": self.bits, "bytes_per_token": self.token_bytes, "unquantized_tokens": self.unquantized_tokens}
        return {"name": self.name, **sizes, **self.quality, "specs": specs}


def options(model: Model, table: pd.DataFrame, dtype: str | None = None) -> list[Option]:
    """The formats of a table (`read_table`) that no other one beats in both size and KL divergence, smallest first.

    Names that are no format's, and formats that a layer of the model cannot have, are passed over.
    """
    found: list[Option] = []
    for name in table.index:
        if name in formats() and model.refused(name) is None:
            parts = tuple(model.parts(name, dtype))
            quality = {column: float(value) for column, value in table.loc[name].items()}
            found.append(Option(name, parts, sum(token_bytes(part.spec, part.layers) for part in parts), quality))
    front: list[Option] = []
    for one in sorted(found, key=lambda option: (option.token_bytes, option.quality["kl"])):
        if not front or one.quality["kl"] < front[-1].quality["kl"]:
            front.append(one)
    return front
