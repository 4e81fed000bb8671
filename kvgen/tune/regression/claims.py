"""What an entry says of itself and no measurement gives: such an entry is damaged, whatever its digest says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from statistics import median

from kvgen.errors import KvgenError
from kvgen.format.sizes import must_read, timed_lengths
from kvgen.registry.entry import Entry
from kvgen.spec import AnyWorkload, KernelSpec, MatrixShape, Workload

BYTES_PER_US = 2e7
"""20 TB/s, which no memory reads."""
FASTER = 1.1
"""The most of a read's speed that is noise, on a GPU."""
FASTER_MATRIX = 1.5
"""Of operations on a matrix, whose roofline is a copy: they may write less than it does."""
FASTER_CPU, FASTER_SMALL, SMALL = 2.0, 10.0, 1 << 24
"""On a CPU, where other programs take their share; below SMALL bytes starting the read's threads may take longer than a kernel of one."""
AHEAD = timedelta(days=1)
"""By which clocks of machines may differ."""


def impossible(entry: Entry) -> str | None:
    """The first claim of an entry that cannot be true; None if there is none."""
    return next(_claims(entry), None)


def _claims(entry: Entry) -> Iterator[str]:
    for timing in entry.timings:
        if timing.samples and not math.isclose(median(timing.samples), timing.us, rel_tol=1e-6):
            yield f"its time at {timing.workload.key} is not the median of its samples"
        yield from _too_fast(entry, timing.workload, timing.read_us, timing.us, timing.default_us)
    exact = isinstance(entry.spec, KernelSpec) and (
        entry.spec.key.quantized or entry.spec.value.quantized or entry.spec.attention.dtype != "float32"
    )
    for key, errors in entry.accuracy.items():
        if not all(0 <= error < math.inf for error in errors.values()):
            yield f"its accuracy at {key} is no error"
        if exact and errors.get("relative_l2") == 0:
            yield f"its error at {key} is 0, which attention of this format cannot reach"
    date = str(entry.provenance.get("date", ""))
    try:
        made = datetime.fromisoformat(date) if date else None
    except ValueError:
        yield f"its date {date!r:.60} is none"
    else:
        if made is not None and made.astimezone(timezone.utc) > datetime.now(timezone.utc) + AHEAD:
            yield f"its date {date} is in the future"


def _too_fast(entry: Entry, work: AnyWorkload, read_us: float | None, *times: float | None) -> Iterator[str]:
    """Of times at one workload, in µs."""
    us = min(time for time in times if time is not None)
    nbytes = 0
    if isinstance(work, MatrixShape):
        nbytes = 3 * work.elements  # and their codes
    elif isinstance(entry.spec, KernelSpec) and isinstance(work, Workload):
        with suppress(KvgenError, ValueError):  # of a layout that is none today another finding tells
            nbytes = must_read(entry.spec, entry.packed, timed_lengths(entry.spec, entry.packed, work))
    if nbytes > BYTES_PER_US * us:
        yield f"its time at {work.key} means {nbytes / us / 1e6:.3g} TB/s"
    limit = FASTER if isinstance(entry.spec, KernelSpec) else FASTER_MATRIX
    if entry.arch == "cpu":
        limit = FASTER_SMALL if nbytes < SMALL else FASTER_CPU
    if read_us is not None and read_us > limit * us:
        yield f"its time at {work.key} is {read_us / us:.0%} of the read's speed"
