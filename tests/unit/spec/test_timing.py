"""Timings as plain data."""

from __future__ import annotations

import json

import pytest

from kvgen.spec import Workload
from kvgen.spec.timing import Timing

WORK = Workload(batch=8, kv_len=4096, q_len=2, weight=0.5)


@pytest.mark.parametrize("timing", [Timing(WORK, 12.5, (12.0, 12.5, 13.0), 10.0, 15.0), Timing(WORK, 12.5)])
def test_json_gives_it_back(timing: Timing) -> None:
    assert Timing.from_json(json.loads(json.dumps(timing.to_json()))) == timing


def test_read_fraction_is_the_share_of_the_read() -> None:
    assert Timing(WORK, 12.5, read_us=10.0).read_fraction == 0.8
    assert Timing(WORK, 12.5).read_fraction is None
    assert Timing(WORK, 0.0, read_us=1.0).read_fraction is None


def test_damaged_data_is_refused() -> None:
    with pytest.raises(ValueError, match="workload.batch: Input should be greater than 0"):
        Timing.from_json({"workload": {"batch": 0}, "us": 1.0})
