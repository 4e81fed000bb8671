"""The plan of a decode step: computed once from the lengths, used by every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvgen.runtime.sequences import Sequences

if TYPE_CHECKING:
    from kvgen.runtime.executable import Executable


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Which KV tiles each CTA attends to in a step, for one launch and the lengths of one moment.

    `Kernel.plan` makes it. It is valid until lengths change: in every layer of a step, before `cache.advance`. One that was captured in a
    CUDA graph is valid within that graph, whose replays compute it anew.
    """

    launch: Executable
    sequences: Sequences
    q_len: int
    append: bool
    """Whether it is for `decode`, which appends q_len tokens, or for `attend`."""
    bound: int
    """No length exceeds it after the step."""
    numbers: torch.Tensor | None
    """int32, as `docs/abi.md` says; None for the static scheduler."""
    version: int
    captured: bool

    def check(self, launch: Executable, sequences: Sequences, q_len: int, *, append: bool) -> None:
        """Raises ValueError if the plan was made for another call."""
        if self.launch is not launch:
            raise ValueError("the plan was made by another kernel")
        if self.sequences is not sequences:
            raise ValueError("the plan was made for another cache, which does not share these lengths")
        if self.q_len != q_len or self.append != append:
            made, taken = (f"{'decode' if a else 'attend'} with {n} query tokens" for a, n in ((self.append, self.q_len), (append, q_len)))
            raise ValueError(f"the plan was made for {made}, and the call is {taken}")
        if self.captured != sequences.capturing:
            where = (
                "within a CUDA graph, whose replays compute it" if self.captured else "outside of this CUDA graph: replays would not follow"
            )
            raise ValueError(f"the plan was made {where}")
        if self.version != sequences.version:
            raise ValueError("the plan was made before lengths changed: make one for every step")
