"""How far two workloads are apart: what an entry, a launch of it, and the first launches of a search are chosen by."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from kvgen.spec.matrix import MatrixShape
    from kvgen.spec.model import KernelSpec, Workload
    from kvgen.spec.operations import AnySpec, AnyWorkload

Coordinates = tuple[float, float, float]
"""log2 of batch, of batch x kv_len, and of q_len; of a matrix: of channels, of elements, and 0."""


def coordinates(batch: int, kv_len: int, q_len: int) -> Coordinates:
    """The coordinates of a workload. A `kv_len` or `q_len` of 0 counts as 1.

    The bytes that a kernel reads follow batch x kv_len, so this decides how many splits and stages pay off; kv_len by itself does not.
    """
    return math.log2(batch), math.log2(batch * max(1, kv_len)), math.log2(max(1, q_len))


def coordinates_of(workload: AnyWorkload) -> Coordinates:
    """The coordinates of a workload."""
    if hasattr(workload, "channels"):  # an exported kernel has no class of matrices to compare with
        shape = cast("MatrixShape", workload)
        return math.log2(shape.channels), math.log2(shape.elements), 0.0
    return coordinates(workload.batch, workload.kv_len, workload.q_len)


def apart(one: Coordinates, other: Coordinates) -> float:
    """The distance of two workloads: doublings of batch, of batch x kv_len and of q_len, added up; 0 for equal workloads."""
    return abs(one[0] - other[0]) + abs(one[1] - other[1]) + abs(one[2] - other[2])


def distance(one: AnyWorkload, other: AnyWorkload) -> float:
    """`apart` for workloads."""
    return apart(coordinates_of(one), coordinates_of(other))


def apart_across_formats(spec: AnySpec, work: AnyWorkload, other: AnySpec, there: AnyWorkload) -> float:
    """Distance of two workloads of two formats: the distance of their coordinates, plus |log2| of the ratio of bits per token.

    KV heads count as sequences and packed-GQA rows as query tokens, so that formats with other heads are comparable. Operations on a matrix
    are as near as their shapes.
    """
    from kvgen.spec.model import KernelSpec, Workload

    if isinstance(spec, KernelSpec) and isinstance(other, KernelSpec) and isinstance(work, Workload) and isinstance(there, Workload):
        return _apart_attention(spec, work, other, there)
    return distance(work, there)


def _apart_attention(spec: KernelSpec, work: Workload, other: KernelSpec, there: Workload) -> float:
    one, two = (
        coordinates(w.batch * s.attention.kv_heads, w.kv_len, w.q_len * s.attention.group) for s, w in ((spec, work), (other, there))
    )
    bits = [s.attention.head_dim * (s.key.bits + s.value.bits) for s in (spec, other)]
    return apart(one, two) + abs(math.log2(bits[0] / bits[1]))


def nearest(tuned: Iterable[Coordinates], wanted: Coordinates) -> int:
    """Index of the workload nearest to the requested one; the first of equals. Raises ValueError for an empty list."""
    distances = [apart(one, wanted) for one in tuned]
    return distances.index(min(distances))
