"""`python -m tests.lives.gpu`: what its variants cover, its processes, and a few of its lives on the CPU."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

import pytest

from kvgen.lower.backend import get_backend
from kvgen.runtime.variant import Variant
from tests.lives import gpu, pool
from tests.lives.cases import LEAST, LifeCase, counted, drawn_cases, drawn_cpu_case


@pytest.mark.slow
def test_every_feature_is_in_several_variants() -> None:
    cases = drawn_cases(0, 100)
    assert {name for name, count in counted(cases).items() if count < LEAST} == set()
    cuda = [case for case in cases if case.schedule.backend == "cuda"]
    for parameter in get_backend("cuda").space(cuda[0].spec, "sm90").parameters:
        if parameter.part == "launch":
            assert {case.schedule.launch[parameter.name] for case in cuda} == set(parameter.values)


def test_a_seed_means_the_same_variants_however_many() -> None:
    assert drawn_cases(1, 2) == drawn_cases(1, 3)[:2]
    assert drawn_cases(2, 1) != drawn_cases(1, 1)


@pytest.mark.slow
def test_lives_on_the_cpu_are_those_of_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--target", "cpu", "--variants", "1", "--count", "4", "--jobs", "1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r" 4 lives of 1 variants, 0 failed, \d+ s$", shown)
    assert int(re.findall(r"prefill (\d+)", shown)[0]) >= 4
    assert sum(map(int, re.findall(r"head_dim(?: \d+)? (\d+);", shown))) == 1
    assert gpu.main(["--target", "cpu", "--variants", "1", "--count", "4", "--jobs", "1", "--seconds", "0"]) == 1
    assert "0 lives of 1 variants" in capsys.readouterr().out


class OtherCap(LifeCase):
    """A module that is told to be of another soft cap than it is."""

    def compiled(self) -> Variant:
        told = replace(self.spec, attention=replace(self.spec.attention, softcap=0.01))
        return Variant(told, self.layout, super().compiled().module)


def test_a_wrong_module_is_found() -> None:
    case = drawn_cpu_case(Random(0))
    lives = gpu.Lives(OtherCap(case.spec, case.schedule, case.target), 0, 0, range(3), time.time() + 600)
    found = [given for given in lives.run() if isinstance(given, gpu.Lived)]
    assert len(found) == 3
    assert any(lived.failure and "output" in lived.failure for lived in found)


@dataclass(frozen=True)
class Does:
    """A task that does one thing."""

    what: str

    def run(self) -> Iterator[object]:
        yield pool.Doing(self.what, 1.0 if self.what == "hang" else 60.0)
        if self.what == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.what == "hang":
            time.sleep(600)
        elif self.what == "raise":
            raise ValueError("raised")
        yield self.what


@pytest.mark.slow
def test_a_process_that_is_lost_loses_its_task_only() -> None:
    tasks = [Does(what) for what in ("well", "crash", "hang", "well", "raise", "well")]
    given = list(pool.run(tasks, 2))
    assert {number for number, one in given if one == "well"} == {0, 3, 5}
    lost = {number: one.reason for number, one in given if isinstance(one, pool.Lost)}
    assert set(lost) == {1, 2, 4}
    assert "crash: the process ended by SIGKILL" in lost[1]
    assert "hang: it took longer than 1 s" in lost[2]
    assert "ValueError: raised" in lost[4]


def test_no_task_begins_too_late() -> None:
    assert list(pool.run([Does("well")], 1, until=time.time() - 1)) == []
