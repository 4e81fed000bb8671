from __future__ import annotations

from dataclasses import replace

from kvgen.lower.schedule import Params, Schedule
from kvgen.spec import Workload
from kvgen.tune.candidate import Candidate, Record
from kvgen.tune.failures import failures


def test_failures_that_differ_in_numbers_alone_are_one_unless_back_ends_differ():
    candidate = Candidate(Schedule("cpu", Params(block=32), Params(threads=1)), Workload(batch=1, kv_len=128))
    wrong = Record(candidate, "wrong", detail="error 3.1e-2 at token 17, allowed 1e-5\n")
    said = [
        wrong,
        replace(wrong, detail="error 0.5 at token 4, allowed 1e-5"),
        replace(wrong, detail="the LSE is NaN"),
        replace(wrong, candidate=Candidate(Schedule("cuda", Params(block=32), Params(threads=1)), candidate.workload)),
        Record(candidate, "ok", 1.0),
    ]
    assert [(one.backend, one.kind, one.count, one.detail) for one in failures(said)] == [
        ("cpu", "wrong", 2, "error 3.1e-2 at token 17, allowed 1e-5"),
        ("cpu", "wrong", 1, "the LSE is NaN"),
        ("cuda", "wrong", 1, "error 3.1e-2 at token 17, allowed 1e-5"),
    ]
