"""The spec language (no torch): models, YAML loading with line numbers, presets, architectures."""

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

__all__ = ["AttentionSpec", "BoostSpec", "CacheSpec", "KernelSpec", "KeySpec", "QuantSpec", "ValueSpec", "Workload"]
