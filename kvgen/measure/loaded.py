"""Loads the module of a candidate that is not trusted yet: its code runs only within its allowance of memory."""

from __future__ import annotations

from collections.abc import Callable

from kvgen.measure.allowance import Allowance
from kvgen.measure.attention import load_attention_candidate
from kvgen.measure.job import Job
from kvgen.measure.matrix import load_matrix_candidate
from kvgen.measure.protocols import Candidate
from kvgen.spec import MatrixSpec

Allow = Callable[[], Allowance]
"""Creates the allowance of a candidate."""


def load_candidate(job: Job, allow: Allow = Allowance) -> Candidate:
    """Load a job's module. Raises KvgenError where it cannot be loaded or lacks a function."""
    if isinstance(job.spec, MatrixSpec):
        return load_matrix_candidate(job, job.spec, allow())
    return load_attention_candidate(job, job.spec, allow())
