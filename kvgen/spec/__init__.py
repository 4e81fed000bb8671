"""The spec language (no torch): models, YAML loading with line numbers, presets, workloads."""

from kvgen.spec.load import dump_spec, load_any_spec, load_as, load_spec
from kvgen.spec.model import (
    AnySpec,
    AnyWorkload,
    AttentionSpec,
    BoostSpec,
    CacheSpec,
    KernelSpec,
    KeySpec,
    LinearFormat,
    LinearShape,
    LinearSpec,
    MatrixFormat,
    MatrixShape,
    MatrixSpec,
    QuantSpec,
    ValueSpec,
    Workload,
)
from kvgen.spec.presets import presets

__all__ = [
    "AnySpec",
    "AnyWorkload",
    "AttentionSpec",
    "BoostSpec",
    "CacheSpec",
    "KernelSpec",
    "KeySpec",
    "LinearFormat",
    "LinearShape",
    "LinearSpec",
    "MatrixFormat",
    "MatrixShape",
    "MatrixSpec",
    "QuantSpec",
    "ValueSpec",
    "Workload",
    "dump_spec",
    "load_any_spec",
    "load_as",
    "load_spec",
    "presets",
]
