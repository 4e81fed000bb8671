"""Facts that search spaces of every GPU back end may mention."""

from __future__ import annotations

from kvgen.arch import CTA_RESERVED, GPUS, Target
from kvgen.lower.space import Fact, spec_facts
from kvgen.spec import KernelSpec


def gpu_facts(spec: KernelSpec, target: Target) -> dict[str, Fact]:
    """Facts of a spec and of a target's architecture; all sizes in bytes. `q_rows` counts packed-GQA rows."""
    gpu = GPUS[target]
    return {
        **spec_facts(spec),
        "q_rows": spec.attention.group * spec.attention.q_len,
        "target": target,
        "bulk_copies": gpu.bulk_copies,
        "clusters": gpu.clusters,
        "processors": gpu.sms,
        "shared_per_cta": gpu.shared_per_cta,
        "shared_per_sm": gpu.shared_per_sm,
        "cta_reserved": CTA_RESERVED,
        "in_flight": gpu.bytes_in_flight,
    }
