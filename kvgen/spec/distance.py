"""How far two workloads are apart: what an entry, and a launch of it, is chosen by."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvgen.spec.model import Workload

Coordinates = tuple[float, float, float]
"""log2 of batch, of batch x kv_len, and of q_len."""


def coordinates(batch: int, kv_len: int, q_len: int) -> Coordinates:
    """The coordinates of a workload. A `kv_len` or `q_len` of 0 counts as 1.

    The bytes that a kernel reads follow batch x kv_len, so this decides how many splits and stages pay off; kv_len by itself does not.
    """
    return math.log2(batch), math.log2(batch * max(1, kv_len)), math.log2(max(1, q_len))


def coordinates_of(workload: Workload) -> Coordinates:
    """The coordinates of a workload."""
    return coordinates(workload.batch, workload.kv_len, workload.q_len)


def apart(one: Coordinates, other: Coordinates) -> float:
    """The distance of two workloads: doublings of batch, of batch x kv_len and of q_len, added up; 0 for equal workloads."""
    return abs(one[0] - other[0]) + abs(one[1] - other[1]) + abs(one[2] - other[2])


def distance(one: Workload, other: Workload) -> float:
    """`apart` for workloads."""
    return apart(coordinates_of(one), coordinates_of(other))


def nearest(tuned: Iterable[Coordinates], wanted: Coordinates) -> int:
    """Index of the workload nearest to the wanted one; the first of equals. Raises ValueError where there is none."""
    distances = [apart(one, wanted) for one in tuned]
    return distances.index(min(distances))
