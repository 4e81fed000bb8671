"""The formats that are compared, and a table of their sizes and of their errors on seeded data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgen.format.sizes import bits_per_element
from kvgen.spec import KernelSpec, load_spec, presets
from kvgen.verify.quality import format_quality

if TYPE_CHECKING:
    import pandas as pd

SAME_AS = {"qserve-int8": "turbomind-int8", "qserve-int4": "turbomind-int4", "int4-gqa-rowwise": "turbomind-int4"}
"""Presets that store the same codes as another one, but for the type of what is not quantized."""
SHIPPED = Path(__file__).with_name("formats.csv")
"""`kvgen accuracy --csv` of all formats."""
ERRORS = tuple(f"{data}_{kind}" for data in ("normal", "structured") for kind in ("relative_l2", "cosine", "weights_l1"))
"""Columns of errors, as `kvgen.verify.quality.Quality` describes them."""


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
