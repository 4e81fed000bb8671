from __future__ import annotations

import pytest

from tests.mutants.__main__ import faults_of
from tests.mutants.cases import CASES


@pytest.mark.parametrize("suite", CASES)
def test_every_fault_can_be_planted_and_every_case_has_one(suite: str) -> None:
    faults = faults_of(suite)
    for fault in faults:
        fault.planted()
    assert {fault.case for fault in faults} == {*CASES[suite]}
    assert len({fault.name for fault in faults}) == len(faults)
