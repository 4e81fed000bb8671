"""Workloads of unequal lengths and of a sustained load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgen.errors import SpecError
from kvgen.spec import Workload, load_spec
from kvgen.spec.model import EQUAL, Lengths
from kvgen.spec.workloads import mean_length, parse, sequence_lengths
from tests.support.specs import base


@st.composite
def traffic(draw: st.DrawFn) -> Workload:
    batch, longest = draw(st.integers(1, 64)), draw(st.integers(2, 50000))
    lengths = draw(st.just(EQUAL) | st.builds(Lengths, min=st.integers(1, longest - 1))) if batch > 1 else EQUAL
    return Workload(
        batch=batch, kv_len=longest, q_len=draw(st.integers(1, 4)), lengths=lengths, load=draw(st.sampled_from(["rested", "sustained"]))
    )


def test_keys_of_equal_and_rested_workloads_are_as_they_were():
    assert Workload(batch=8, kv_len=32768).key == "8x32768"
    assert Workload(batch=8, kv_len=32768, q_len=4).key == "8x32768q4"


@given(traffic())
def test_a_key_is_read_back(work):
    assert parse(work.key) == work


def test_keys_tell_lengths_and_load_apart():
    keys = [Workload(batch=48, kv_len=24576, lengths=Lengths(min=300)).key, Workload(batch=8, kv_len=32768, load="sustained").key]
    assert keys == ["48x300-24576", "8x32768:sustained"]


@pytest.mark.parametrize("text", ["8", "8x", "x8", "8x32768:tired", "8x0", "0x8", "8x9-9", "8x10-9", "8x99999999999"])
def test_what_is_no_workload_is_refused(text):
    with pytest.raises(ValueError, match="is not a workload|out of range"):
        parse(text)


@given(traffic(), st.integers(0, 5))
def test_lengths_fill_the_range_and_their_total_does_not_depend_on_the_seed(work, seed):
    lengths = sequence_lengths(work, seed)
    assert len(lengths) == work.batch
    assert max(lengths) == work.kv_len
    assert min(lengths) >= work.shortest
    assert sorted(lengths) == sorted(sequence_lengths(work, seed + 1))


def test_as_many_sequences_in_every_doubling():
    lengths = sequence_lengths(parse("600x64-4096"))
    counts = [sum(64 << step <= length < 128 << step for length in lengths) for step in range(6)]
    assert sum(counts) == 599  # the longest is none of them
    assert max(counts) - min(counts) <= 3
    assert sum(lengths) / 600 == pytest.approx(mean_length(parse("600x64-4096")), rel=0.01)


def test_a_spec_says_what_traffic_is():
    works = [{"batch": 48, "kv_len": 24576, "lengths": {"min": 300, "max": 24576, "distribution": "log_uniform"}}]
    works += [{"batch": 8, "kv_len": 32768, "load": "sustained"}, {"batch": 8, "kv_len": 32768, "lengths": "equal", "load": "rested"}]
    assert [work.key for work in load_spec(base(workloads=works)).workloads] == ["48x300-24576", "8x32768:sustained", "8x32768"]


@pytest.mark.parametrize(
    ("work", "words"),
    [
        ({"lengths": {"min": 64, "max": 200}}, "which is the longest"),
        ({"lengths": {"min": 256}}, "not below kv_len"),
        ({"batch": 1, "lengths": {"min": 16}}, "one sequence has one length"),
        ({"lengths": "ragged"}, "must be equal, or a mapping"),
        ({"lengths": {"min": 16, "distribution": "normal"}}, "distribution"),
        ({"lengths": {"max": 256}}, "min: required"),
        ({"lengths": {"min": 16, "distribution": "equal"}}, "equal lengths have no min"),
        ({"lengths": None}, "mapping"),
        ({"lengths": {"min": 0}}, "greater than 0"),
        ({"load": "heavy"}, "load"),
    ],
)
def test_traffic_that_contradicts_itself_is_refused_with_its_place(work, words):
    with pytest.raises(SpecError, match=words):
        load_spec(base(workloads=[{"batch": 4, "kv_len": 256, **work}]))
