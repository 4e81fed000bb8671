"""Planted faults: the comparison of every row with the reference sees each of them.

One more is of GPUs alone, a plan of the step before: modules of a CPU plan for themselves (`tests/gpu/test_paged.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from kvgen.integrations.vllm import versions
from kvgen.integrations.vllm.backend import KvgenBuilder
from kvgen.runtime.paged import PagedCalls, Rows
from tests.vllm.engines import PLAIN, SAW, Engines, generate, ids, watching

SHARED = ids(7, 300)
PROMPTS = [ids(1, 70), SHARED, SHARED[:270] + ids(8, 10)]
"""The last one hits pages that the second fills in the same step."""
Patch = pytest.MonkeyPatch


def another_residual(patch: Patch) -> None:
    """From the third step on, the residuals of other requests."""
    stock, steps = versions.slots_of, iter(range(1000))
    patch.setattr(versions, "slots_of", lambda *given: stock(*given)[:: -1 if next(steps) > 2 else 1].copy())


def another_place(patch: Patch) -> None:
    """A token lies where the next one of its sequence belongs."""
    stock = PagedCalls.write
    patch.setattr(PagedCalls, "write", lambda self, k, v, store, slots: stock(self, k, v, store, slots + 1))


def row_after_row(patch: Patch, order: int = 1) -> None:
    """A row is written right before it attends: that of the fewest tokens first, with pages that a longer one has not written."""
    write, attend, held = PagedCalls.write, PagedCalls.attend, []

    def later(self: PagedCalls, *new: Any) -> None:
        held[:] = [new]

    def one_by_one(self: PagedCalls, q: Tensor, out: Tensor, store: Any, rows: Rows, starts: Any, **more: Any) -> None:
        k, v, _, slots = held[0]
        for b in sorted(range(len(starts) - 1), key=lambda b: order * (starts[b + 1] - starts[b])):
            mine, bounds = slice(starts[b], starts[b + 1]), more["bounds"][b : b + 1]
            write(self, k[mine], v[mine], store, slots[mine])
            attend(self, q[mine], out[mine], store, rows[b : b + 1], [0, mine.stop - mine.start], **{**more, "bounds": bounds})

    patch.setattr(PagedCalls, "write", later)
    patch.setattr(PagedCalls, "attend", one_by_one)


def lengths_of_the_step_before(patch: Patch) -> None:
    stock = KvgenBuilder.build

    def build(self: Any, *given: Any, **more: Any) -> Any:
        before = self._numbers[0].clone()
        made = stock(self, *given, **more)
        if given[1].max_query_len == 1:
            made.after.lengths.copy_(before[: len(made.after.lengths)])
        return made

    patch.setattr(KvgenBuilder, "build", build)


FAULTS: list[tuple[Any, Callable[[Patch], None]]] = [
    (PLAIN, another_residual),
    (PLAIN, lengths_of_the_step_before),
    (SAW, lengths_of_the_step_before),
    (SAW, another_place),
    (SAW, row_after_row),
]


def error(llm: Any, plant: Callable[[Patch], None]) -> float:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with watching() as seen:
            seen.limit = float("inf")
            _, hits = generate(llm, PROMPTS, 6)
    assert hits == [0, 0, 256]
    return seen.worst


@pytest.mark.parametrize(("form", "plant"), FAULTS)
def test_a_fault_is_seen(engine: Engines, model: Path, form: Any, plant: Callable[[Patch], None]) -> None:
    assert error(engine(model, form), plant) > 1e-2


@pytest.mark.parametrize("form", [PLAIN, SAW])
def test_without_a_fault_none_is_seen(engine: Engines, model: Path, form: Any) -> None:
    assert error(engine(model, form), (lambda patch: row_after_row(patch, -1)) if form is SAW else lambda _: None) < 1e-5
