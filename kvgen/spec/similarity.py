"""How far two workloads of different formats are apart: launches that won for similar formats come first in a search."""

from __future__ import annotations

import math

from kvgen.spec.distance import Coordinates, apart, coordinates, distance, mean_length
from kvgen.spec.model import KernelSpec, Workload
from kvgen.spec.operations import AnySpec, AnyWorkload


def apart_across_formats(spec: AnySpec, work: AnyWorkload, other: AnySpec, there: AnyWorkload) -> float:
    """Distance of two workloads of two formats: the distance of their coordinates, plus |log2| of the ratio of bits per token.

    KV heads count as sequences and packed-GQA rows as query tokens, so that formats with other heads are comparable. Operations on a matrix
    are as near as their shapes.
    """
    if isinstance(spec, KernelSpec) and isinstance(other, KernelSpec) and isinstance(work, Workload) and isinstance(there, Workload):
        return _apart_attention(spec, work, other, there)
    return distance(work, there)


def _apart_attention(spec: KernelSpec, work: Workload, other: KernelSpec, there: Workload) -> float:
    one, two = (_across(spec, work), _across(other, there))
    bits = [s.attention.head_dim * (s.key.bits + s.value.bits) for s in (spec, other)]
    return apart(one, two) + abs(math.log2(bits[0] / bits[1]))


def _across(spec: KernelSpec, work: Workload) -> Coordinates:
    heads, a = work.batch * spec.attention.kv_heads, spec.attention
    return coordinates(heads, work.kv_len, work.q_len * a.group, heads * mean_length(work), sustained=work.load == "sustained")
