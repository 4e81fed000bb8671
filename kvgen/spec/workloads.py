"""Workloads: their names, the lengths of their sequences, how far two of them are apart, and the measurement of one."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from kvgen.plaindata import Json
from kvgen.spec.model import EQUAL, MAX_BATCH, MAX_KV_LEN, MAX_Q_LEN, AnyWorkload, Lengths, LinearShape, MatrixShape, Workload

NAME = re.compile(r"([0-9]{1,18})x(?:([0-9]{1,18})-)?([0-9]{1,18})(?:q([0-9]{1,18}))?(?::(rested|sustained))?")
FORM = "batch x tokens, e.g. 1x32768; 1x32768q4 for 4 query tokens, 48x300-24576 for lengths from 300 to 24576, 8x32768:sustained"

Coordinates = tuple[float, float, float, float, float]
"""log2 of batch, of the tokens of all sequences, of q_len, and of longest over mean length; 1 for a sustained load, else 0. Of a matrix:
log2 of channels and of elements, then zeros; of a linear layer log2 of rows, then zeros."""


def parse(text: str) -> Workload:
    """The workload of a name, as `Workload.key` writes it. Raises ValueError where it is none, or where a number is out of range."""
    match = NAME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r:.80} is not a workload; write {FORM}")
    batch, kv_len, q_len = int(match[1]), int(match[3]), int(match[4] or 1)
    shortest = None if match[2] is None else int(match[2])
    within = 0 < batch <= MAX_BATCH and 0 < kv_len <= MAX_KV_LEN and 0 < q_len <= MAX_Q_LEN
    if not within or (shortest is not None and not 0 < shortest < kv_len):
        raise ValueError(
            f"workload {text!r} is out of range: 1 to {MAX_BATCH} sequences of up to {MAX_KV_LEN} tokens, 1 to {MAX_Q_LEN} query tokens, "
            "the shortest of unequal lengths below the longest"
        )
    lengths = EQUAL if shortest is None else Lengths(min=shortest)
    return Workload(batch=batch, kv_len=kv_len, q_len=q_len, lengths=lengths, load="sustained" if match[5] == "sustained" else "rested")


def sequence_lengths(workload: Workload, seed: int = 0) -> list[int]:
    """Tokens of each sequence, in an order that follows from the seed; the longest has kv_len tokens.

    Of unequal lengths, sequence i of n is at quantile (i + 1/2) / n of the distribution, so that the total does not depend on the seed.
    """
    low, high, batch = workload.shortest, workload.kv_len, workload.batch
    if low == high:
        return [high] * batch
    lengths = [round(low * (high / low) ** ((number + 0.5) / batch)) for number in range(batch)]
    lengths[-1] = high
    random.Random(seed).shuffle(lengths)
    return lengths


def mean_length(workload: Workload) -> float:
    """Mean tokens of a workload's sequences."""
    low, high = workload.shortest, workload.kv_len
    return float(high) if low == high else (high - low) / math.log(high / low)


def matrix_coordinates(tokens: int, channels: int) -> Coordinates:
    """The coordinates of a matrix."""
    return math.log2(channels), math.log2(tokens * channels), 0.0, 0.0, 0.0


def coordinates_of(workload: AnyWorkload) -> Coordinates:
    """The coordinates of a workload.

    The bytes that a kernel reads follow the tokens of all sequences, so these decide how many splits and stages pay off; kv_len by itself
    does not.
    """
    if isinstance(workload, MatrixShape):
        return matrix_coordinates(workload.tokens, workload.channels)
    if isinstance(workload, LinearShape):
        return math.log2(workload.rows), 0.0, 0.0, 0.0, 0.0
    mean = mean_length(workload)
    total, unequal = math.log2(workload.batch * mean), math.log2(workload.kv_len / mean)
    return math.log2(workload.batch), total, math.log2(workload.q_len), unequal, float(workload.load == "sustained")


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


MOST_SPREAD = 0.1
"""Samples that differ by more were disturbed: by other load, or by clocks that fell."""


def spread(samples: Sequence[float]) -> float:
    """By how much samples differ: the range of their middle 80 %, over the median; of fewer than ten, of all."""
    ordered = sorted(samples)
    cut = len(ordered) // 10
    return (ordered[-1 - cut] - ordered[cut]) / median(ordered) if ordered else 0.0


@dataclass(frozen=True)
class Timing(Json):
    """Time of one workload in microseconds per call."""

    workload: AnyWorkload
    us: float
    """Median."""
    samples: tuple[float, ...] = ()
    """Every sample that `us` is the median of."""
    read_us: float | None = None
    """A pure read of the same bytes in the same run; of the quantization of a matrix, a copy that moves them."""
    default_us: float | None = None
    """The default schedule in the same run."""
    watts: float | None = None
    """Power of the GPU during the measurement, if the workload's load is sustained."""
    clock_mhz: float | None = None
    """Clock of its multiprocessors then."""

    read_fraction: float | None = field(init=False, default=None)
    """Share of the read's speed that the kernel reaches: 1 is as fast as reading alone."""

    def __post_init__(self) -> None:
        fraction = self.read_us / self.us if self.read_us is not None and self.us > 0 else None
        object.__setattr__(self, "read_fraction", fraction)

    @property
    def disturbed(self) -> bool:
        """Whether the samples differ by more than MOST_SPREAD."""
        return spread(self.samples) > MOST_SPREAD
