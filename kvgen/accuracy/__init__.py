"""The formats that are compared, a table of their sizes and of their errors on seeded data, and those that fit a model: that no other one
beats in both.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgen.errors import SpecError
from kvgen.format.sizes import bits_per_element, token_bytes
from kvgen.spec import KernelSpec, dump_spec, load_spec, presets
from kvgen.spec.layers import MODELS, Config, Layers, known_config, layer_specs, layers_of, spec_name
from kvgen.verify.reference import format_quality

if TYPE_CHECKING:
    import pandas as pd

SAME_AS = {"qserve-int8": "turbomind-int8", "qserve-int4": "turbomind-int4", "int4-gqa-rowwise": "turbomind-int4"}
"""Presets that store the same codes as another one, but for the type of what is not quantized."""
SHIPPED = Path(__file__).with_name("formats.csv")
"""`kvgen accuracy --csv` of all formats."""
ERRORS = tuple(f"{data}_{kind}" for data in ("normal", "structured") for kind in ("relative_l2", "cosine", "weights_l1"))
"""Columns of errors, as `kvgen.verify.reference.Quality` describes them."""


@cache
def formats() -> dict[str, dict[str, Any]]:
    """Formats by name, as mappings without heads: the presets, and two of mixed widths."""
    mixed = {
        name: {"preset": "bitdecoding-int4", "key": {"bits": k}, "value": {"bits": v}} for name, k, v in (("k8v4", 8, 4), ("k4v2", 4, 2))
    }
    return {name: {"preset": name} for name in presets() if name not in SAME_AS} | mixed


@cache
def suite() -> dict[str, KernelSpec]:
    """The same as specs, with Llama-3.1-8B's heads in float16."""
    heads = {**presets()["kitty"].attention.to_json(), "dtype": "float16"}
    return {name: load_spec({**fields, "name": name, "attention": heads}) for name, fields in formats().items()}


def records(specs: Mapping[str, KernelSpec]) -> Iterator[dict[str, Any]]:
    """One format after the other: its name, bits per element, tokens kept in 16 bits, and its errors."""
    for name, spec in specs.items():
        quality = format_quality(spec)
        errors = {f"{data}_{kind}": value for data in ("normal", "structured") for kind, value in quality[data].items()}
        yield {"format": name, "bits": bits_per_element(spec), "unquantized_tokens": spec.cache.unpacked, **errors}


def read_table() -> pd.DataFrame:
    """The table that ships, by format.

    The column `error` is the sum of two errors on structured data: the relative L2 of the output, which is mostly V's, and the L1 distance
    of the weights, which is K's alone.
    """
    import pandas as pd

    found = pd.read_csv(SHIPPED).set_index("format")[[*ERRORS]]
    return found.assign(error=found.structured_relative_l2 + found.structured_weights_l1)


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

        Raises SpecError where a kind of layer cannot have the format.
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
    errors: dict[str, float]
    """On seeded data, by column of the table."""

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
        return {"name": self.name, **sizes, **self.errors, "specs": specs}


def options(model: Model, table: pd.DataFrame, dtype: str | None = None) -> list[Option]:
    """The formats of a table (`read_table`) that no other one beats in both size and `error`, smallest first.

    Names that are no format's, and formats that a layer of the model cannot have, are passed over.
    """
    found: list[Option] = []
    for name in table.index:
        if name in formats() and model.refused(name) is None:
            parts = tuple(model.parts(name, dtype))
            errors = {column: float(value) for column, value in table.loc[name].items()}
            found.append(Option(name, parts, sum(token_bytes(part.spec, part.layers) for part in parts), errors))
    front: list[Option] = []
    for one in sorted(found, key=lambda option: (option.token_bytes, option.errors["error"])):
        if not front or one.errors["error"] < front[-1].errors["error"]:
            front.append(one)
    return front
