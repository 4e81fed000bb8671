"""Faults in the CUDA kernels of linear layers, judged by the emulator of tests/unit/lower_cuda: no GPU is needed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from kvgen.errors import CheckError
from kvgen.measure.measurement import Measurement
from kvgen.spec import LinearSpec
from kvgen.verify import CheckPolicy
from kvgen.verify.linear import LinearCheck
from tests.mutants.cases import Case
from tests.unit.lower_cuda import emulate_linear

OTHERS = ("linear/instructions.cuh", "linear/module.cuh")
"""Headers that the emulator has its own of, or none."""


def compiled(case: Case, planted: Mapping[str, str], folder: Path) -> Path:
    """The library of a case; `planted` are other texts of headers. Raises CalledProcessError where it does not compile."""
    assert isinstance(case.spec, LinearSpec)
    folder.mkdir(parents=True)
    return emulate_linear.compiled(case.spec, case.schedule, folder, planted)


def judged(case: Case, library: Path, timeout_s: float) -> Measurement:
    """What the verification says, in a process of its own, which a fault may end or stop."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_check, args=(case, library, there))
    process.start()
    there.close()
    try:
        if not here.poll(timeout_s):
            return Measurement("timeout", f"no answer for {timeout_s:g} seconds")
        detail = here.recv()
    except EOFError:
        return Measurement("crash", "the process ended")
    finally:
        process.kill()
        process.join()
    return Measurement("wrong", detail) if detail else Measurement("ok")


def _check(case: Case, library: Path, answer: Connection) -> None:
    assert isinstance(case.spec, LinearSpec)
    torch.set_num_threads(1)
    check = LinearCheck(emulate_linear.emulated(case.spec, case.schedule, library), "cpu", CheckPolicy(repeats=2))
    try:
        check.prepare()
        check.run()
        answer.send("")
    except CheckError as error:
        answer.send(str(error))
