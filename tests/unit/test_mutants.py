"""The suite of planted faults: their texts are in the headers, cases are in their spaces."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvgen.errors import CompileError
from kvgen.lower.backend import get_backend
from kvgen.measure.measurement import Measurement
from tests.mutants import run as harness
from tests.mutants.emulator import emulated_case
from tests.mutants.fault import Case, Fault, MisplacedFault, planted
from tests.mutants.plant import ROOT, faulty_source
from tests.mutants.suite import CASES, SUITES

EVERY = [(suite, fault) for suite, faults in SUITES.items() for fault in faults]
PLANTED = [case for cases in CASES.values() for case in cases.values()]


@pytest.mark.parametrize(("suite", "fault"), EVERY, ids=lambda x: x if isinstance(x, str) else x.name)
def test_a_fault_is_where_it_is_declared(suite: str, fault: Fault) -> None:
    text = (ROOT / fault.file).read_text()
    assert planted(fault, text) != text
    assert fault.case in CASES[suite]
    assert "|" not in fault.breaks
    assert not fault.breaks.endswith(".")


def test_suites_are_large_and_names_are_unique() -> None:
    for suite, least in (("cpu", 40), ("cuda", 60)):
        names = [fault.name for fault in SUITES[suite]]
        assert len(names) == len(set(names)) >= least
        assert {fault.case for fault in SUITES[suite]} == set(CASES[suite])
    assert sum(fault.name.startswith("tilelang-") for fault in SUITES["cuda"]) >= 5


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: f"{case.backend}-{case.name}")
def test_a_case_can_be_lowered(case: Case) -> None:
    space = get_backend(case.backend).space(case.spec, case.target)
    assert space.check(case.schedule) == []
    if case.backend != "cpu":
        assert [space.check(case.schedule, workload) for workload in case.workloads] == [[]] * len(case.workloads)


def test_a_text_that_is_gone_or_there_twice_is_found_out() -> None:
    fault = Fault("f", "x.hpp", "c", "it breaks", "a < b", "a <= b")
    assert planted(fault, "if (a < b) x;") == "if (a <= b) x;"
    for text in ("if (b > a) x;", "a < b, a < b"):
        with pytest.raises(MisplacedFault, match="f: its text occurs"):
            planted(fault, text)
    assert planted(replace(fault, nth=2), "a < b, a < b") == "a < b, a <= b"
    with pytest.raises(MisplacedFault):
        planted(replace(fault, nth=3), "a < b, a < b")


def test_a_planted_header_is_found_before_the_real_one(tmp_path: Path) -> None:
    fault = SUITES["cpu"][0]
    case = CASES["cpu"][fault.case]
    sound, faulty = case.source(), faulty_source(fault, case, tmp_path)
    assert faulty.text == sound.text
    assert faulty.id != sound.id
    assert {header.name for header in faulty.headers} == {header.name for header in sound.headers}
    assert fault.replace in (tmp_path / fault.file[fault.file.index("include/") :]).read_text()
    with pytest.raises(MisplacedFault, match="does not include"):
        faulty_source(replace(SUITES["cuda"][0], name="elsewhere"), case, tmp_path / "other")


class Judges:
    """Says of artifacts, by name, what it was told to."""

    size = 2

    def __init__(self, **kinds: str) -> None:
        self.kinds = kinds

    def judge(self, case: Case, artifact: Path) -> Measurement:
        return Measurement(self.kinds.get(str(artifact), "wrong"), "it is wrong")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kinds", "refused", "code"),
    [
        ({"splits": "ok"}, "", 0),
        ({"splits": "ok", "merge-sum": "ok"}, "", 1),
        ({"splits": "ok", "merge-sum": "unsupported"}, "", 1),
        ({"splits": "wrong"}, "", 2),
        ({"splits": "ok"}, "merge-sum", 3),
    ],
)
def test_the_exit_code_says_what_came_of_the_suite(
    kinds: dict[str, str], refused: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(source: SimpleNamespace, _: object) -> SimpleNamespace:
        if source.name == refused:
            raise CompileError("it does not compile")
        return SimpleNamespace(path=source.name, resources=SimpleNamespace(seconds=1.0))

    monkeypatch.setattr(harness, "build", build)
    monkeypatch.setattr(harness, "faulty_source", lambda fault, *_: SimpleNamespace(name=fault.name))
    monkeypatch.setattr(Case, "source", lambda case: SimpleNamespace(name=case.name))
    faults = harness.chosen("cpu", ["merge-sum", "merge-weight"])
    suite = harness.Suite(faults, CASES["cpu"], tmp_path, 1, lambda _: None)
    args = argparse.Namespace(suite="cpu", out=tmp_path / "found.json")
    assert harness.run(suite, Judges(**kinds), args) == code  # type: ignore[arg-type]
    suite.close()
    assert args.out.exists() == (code != 2)


def test_most_cuda_faults_are_reached_by_the_emulator() -> None:
    reached = [fault.name for fault in SUITES["cuda"] if emulated_case(fault) is not None]
    assert len(reached) >= 60
    assert {"bulk-parity", "bulk-bytes"} < set(reached)
    assert not any(name.startswith("tilelang-") for name in reached)
