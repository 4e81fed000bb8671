"""How far two workloads are apart: what an entry, a launch of it, and the first launches of a search are chosen by."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from kvgen.spec.matrix import MatrixShape
    from kvgen.spec.model import Workload
    from kvgen.spec.operations import AnyWorkload

Coordinates = tuple[float, float, float, float, float]
"""log2 of batch, of the tokens of all sequences, of q_len, and of longest over mean length; 1 for a sustained load, else 0. Of a matrix:
log2 of channels and of elements, then zeros."""


def coordinates(batch: int, kv_len: int, q_len: int, tokens: float | None = None, *, sustained: bool = False) -> Coordinates:
    """The coordinates of a workload whose longest sequence has `kv_len` tokens, and all of them `tokens` (by default batch x kv_len).

    A number of tokens of 0 counts as 1 for each sequence. The bytes that a kernel reads follow the tokens of all sequences, so these decide
    how many splits and stages pay off; kv_len by itself does not.
    """
    most = batch * max(1, kv_len)
    total = most if tokens is None else min(most, max(batch, tokens))
    return math.log2(batch), math.log2(total), math.log2(max(1, q_len)), math.log2(most / total), float(sustained)


def mean_length(workload: Workload) -> float:
    """Mean tokens of a workload's sequences."""
    low, high = workload.shortest, workload.kv_len
    return float(high) if low == high else (high - low) / math.log(high / low)


def coordinates_of(workload: AnyWorkload) -> Coordinates:
    """The coordinates of a workload."""
    if hasattr(workload, "channels"):  # an exported kernel has no class of matrices to compare with
        shape = cast("MatrixShape", workload)
        return math.log2(shape.channels), math.log2(shape.elements), 0.0, 0.0, 0.0
    tokens = workload.batch * mean_length(workload)
    return coordinates(workload.batch, workload.kv_len, workload.q_len, tokens, sustained=workload.load == "sustained")


def apart(one: Coordinates, other: Coordinates) -> float:
    """The distance of two workloads: doublings of batch, tokens, q_len and longest over mean length, and 1 for another load, added up.

    It is 0 for equal workloads alone.
    """
    return abs(one[0] - other[0]) + abs(one[1] - other[1]) + abs(one[2] - other[2]) + abs(one[3] - other[3]) + abs(one[4] - other[4])


def distance(one: AnyWorkload, other: AnyWorkload) -> float:
    """`apart` for workloads."""
    return apart(coordinates_of(one), coordinates_of(other))


def nearest(tuned: Iterable[Coordinates], wanted: Coordinates) -> int:
    """Index of the workload nearest to the requested one; the first of equals. Raises ValueError for an empty list."""
    distances = [apart(one, wanted) for one in tuned]
    return distances.index(min(distances))
