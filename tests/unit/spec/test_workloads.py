"""Names of workloads, lengths of their sequences, and how far they are apart."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgen.errors import SpecError
from kvgen.spec import Workload, load_spec
from kvgen.spec.model import EQUAL, Lengths
from kvgen.spec.workloads import Timing, distance, mean_length, parse
from kvgen.spec.workloads import sequence_lengths as lengths_of
from tests.support.specs import base


@st.composite
def traffic(draw: st.DrawFn) -> Workload:
    batch, longest = draw(st.integers(1, 64)), draw(st.integers(2, 50000))
    lengths = draw(st.just(EQUAL) | st.builds(Lengths, min=st.integers(1, longest - 1))) if batch > 1 else EQUAL
    load = draw(st.sampled_from(["rested", "sustained"]))
    return Workload(batch=batch, kv_len=longest, q_len=draw(st.integers(1, 4)), lengths=lengths, load=load)


@given(traffic())
def test_a_key_is_read_back(work: Workload) -> None:
    assert parse(work.key) == work


def test_keys_tell_what_differs() -> None:
    works = [{"batch": 48, "kv_len": 24576, "lengths": {"min": 300, "max": 24576, "distribution": "log_uniform"}}]
    works += [{"batch": 8, "kv_len": 32768, "load": "sustained"}, {"batch": 8, "kv_len": 32768, "lengths": "equal", "load": "rested"}]
    assert [work.key for work in load_spec(base(workloads=works)).workloads] == ["48x300-24576", "8x32768:sustained", "8x32768"]
    assert parse("48x24576").lengths == EQUAL
    assert Workload(batch=8, kv_len=32768, q_len=4).key == "8x32768q4"


@pytest.mark.parametrize("text", ["8", "8x", "x8", "8x32768:tired", "8x0", "0x8", "8x9-9", "8x99999999999"])
def test_what_is_no_workload_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a workload|out of range"):
        parse(text)


def test_as_many_sequences_in_every_doubling() -> None:
    lengths = lengths_of(parse("600x64-4096"))
    counts = [sum(64 << step <= length < 128 << step for length in lengths) for step in range(6)]
    assert max(counts) - min(counts) <= 3
    assert sum(lengths) / 600 == pytest.approx(mean_length(parse("600x64-4096")), rel=0.01)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        ({"lengths": {"min": 64, "max": 200}}, "which is the longest"),
        ({"lengths": {"min": 256}}, "not below kv_len"),
        ({"batch": 1, "lengths": {"min": 16}}, "one sequence has one length"),
        ({"lengths": "ragged"}, "must be equal, or a mapping"),
        ({"lengths": {"max": 256}}, "min: required"),
        ({"lengths": {"min": 16, "distribution": "equal"}}, "equal lengths have no min"),
        ({"lengths": {"min": 0}}, "greater than 0"),
    ],
)
def test_traffic_that_contradicts_itself_is_refused_with_its_place(work: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        load_spec(base(workloads=[{"batch": 4, "kv_len": 256, **work}]))


@pytest.mark.parametrize(
    ("one", "other", "doublings"),
    [("1x4096", "2x4096", 2), ("1x4096", "4x1024", 2), ("1x4096", "1x4096q8", 3), ("64x1024", "32x8192", 3), ("64x1024", "1x4096", 10)],
)
def test_doublings_of_batch_of_all_tokens_and_of_query_tokens_add_up(one: str, other: str, doublings: float) -> None:
    assert distance(parse(one), parse(other)) == doublings


def test_a_timing_is_plain_data() -> None:
    work = Workload(batch=8, kv_len=4096, q_len=2, weight=0.5)
    for timing in (Timing(work, 12.5, (12.0, 12.5, 13.0), 10.0, 15.0), Timing(work, 12.5)):
        assert Timing.from_json(json.loads(json.dumps(timing.to_json()))) == timing
        assert timing.read_fraction == (0.8 if timing.read_us else None)
    with pytest.raises(ValueError, match="workload.batch: Input should be greater than 0"):
        Timing.from_json({"workload": {"batch": 0}, "us": 1.0})
