"""The spec language (no torch): models, YAML loading with line numbers, presets, architectures."""

from kvgen.spec.load import dump_spec, load_any_spec, load_spec
from kvgen.spec.matrix import MatrixFormat, MatrixShape, MatrixSpec
from kvgen.spec.model import (
    AttentionSpec,
    BoostSpec,
    CacheSpec,
    KernelSpec,
    KeySpec,
    QuantSpec,
    ValueSpec,
    Workload,
)
from kvgen.spec.operations import AnySpec, AnyWorkload
from kvgen.spec.presets import presets

__all__ = [
    "AnySpec",
    "AnyWorkload",
    "AttentionSpec",
    "BoostSpec",
    "CacheSpec",
    "KernelSpec",
    "KeySpec",
    "MatrixFormat",
    "MatrixShape",
    "MatrixSpec",
    "QuantSpec",
    "ValueSpec",
    "Workload",
    "dump_spec",
    "load_any_spec",
    "load_spec",
    "presets",
]
