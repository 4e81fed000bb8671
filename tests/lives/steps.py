"""Random steps of emulated kernels, beside a reference: outputs, the LSE, lengths, what is appended, and the same bits again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from random import Random
from typing import Generic, Protocol, TypeVar

import torch

from kvgen.spec import KernelSpec
from kvgen.verify.cache import ReferenceCache
from kvgen.verify.tolerance import relative_l2, row_tolerance, tolerance, worst_relative_l2
from tests.lives.drawn import KINDS, dense, drawn_query, drawn_sinks, drawn_tensor
from tests.lives.layers import require
from tests.lives.packing import drawn_crop

STEPS = 4


@dataclass(frozen=True)
class Drawn:
    """What is asked of a step, by either scheduler."""

    q: torch.Tensor
    new: tuple[torch.Tensor, torch.Tensor] | None
    planned: bool
    skip_empty: bool
    limit: int
    sinks: torch.Tensor | None


class AnyStep(Protocol):
    """A dataclass of what a call reads; `run` sets what it writes."""

    out: torch.Tensor
    lse: torch.Tensor
    lengths: torch.Tensor

    def run(self) -> None:
        """Call the kernel."""


S = TypeVar("S", bound=AnyStep)


class StepLife(ABC, Generic[S]):
    """Steps over a cache that starts with drawn lengths. Raises AssertionError or Wrong at the first difference."""

    def __init__(self, spec: KernelSpec, block: int, draw: Random, *, exact: bool) -> None:
        self.spec, self.draw, self.row_limit = spec, draw, row_tolerance(spec.attention.dtype, exact=exact)
        cache = spec.cache
        edge = cache.unpacked + block
        edges = (0, 1, cache.sink, edge - 1, edge, edge + block - 1)
        sizes = (*edges, draw.randint(0, 400), draw.randint(0, 1200), draw.randint(0, 3 * block))
        self.batch = draw.randint(1, 4)
        self.held = ReferenceCache(spec, self.batch, block)
        lengths = [draw.choice(sizes) for _ in range(self.batch)]
        self.kinds = [draw.choice(KINDS) for _ in range(2)]
        self.held.prefill(*self.new(max(1, *lengths)), torch.tensor(lengths, dtype=torch.int32))
        self.calls = [f"lengths {lengths}, {self.kinds}"]

    @abstractmethod
    def made(self, drawn: Drawn) -> S:
        """The step, with what else a back end may vary."""

    @abstractmethod
    def kept(self, step: S, before: list[int], appended: bool) -> None:
        """Raises unless workspace and, where tokens are `appended`, the cache are left as they must be; the reference made the step."""

    def live(self) -> None:
        """Some steps."""
        for _ in range(STEPS):
            self.step()
            if self.spec.cache.rollback and self.draw.random() < 0.6:
                self.crop()

    def step(self) -> None:
        """`attend` or `decode`."""
        draw, held = self.draw, self.held
        lengths: list[int] = held.lengths.tolist()
        tokens, planned, append = draw.randint(1, self.spec.attention.q_len), draw.random() < 0.5, draw.random() < 0.6
        skip = planned and draw.random() < 0.3
        limit = max(lengths) + tokens - 1 if append and draw.random() < 0.15 else 1 << 30
        q, sinks = dense(drawn_query(draw, self.spec, self.batch, tokens, held.keys_values()[0])), drawn_sinks(draw, self.spec)
        new = tuple(map(dense, self.new(tokens))) if append else None
        step = self.made(Drawn(q, (new[0], new[1]) if new else None, planned, skip, limit, sinks))
        self.calls.append(
            f"{'decode' if append else 'attend'} {tokens}{' planned' if planned else ''}{' skip' if skip else ''} at {lengths}"
        )
        step.run()
        repeated(step)
        works = [length + tokens <= limit or (skip and not length) for length in lengths]
        if new:
            counts = torch.tensor([tokens * (there and not (skip and not n)) for there, n in zip(works, lengths, strict=True)])
            held.append(*new, counts)
        want = held.attend(q, sinks=sinks)
        held.flush()
        for b, there in enumerate(works):
            if not there:
                require(bool(step.out[b].isnan().all() & step.lse[b].isnan().all()), f"sequence {b} without room is written")
                step.out[b], step.lse[b] = want[0][b].to(q.dtype), want[1][b].float()
        require(relative_l2(step.out, want[0]) <= tolerance(q.dtype), f"relative l2 of the output is {relative_l2(step.out, want[0]):.3g}")
        worst = worst_relative_l2(step.out, want[0])
        require(worst <= self.row_limit, f"the worst row is off by {worst:.3g}")
        seen = torch.isfinite(want[1])
        require(torch.equal(torch.isfinite(step.lse), seen), "the LSE of a query that sees nothing")
        error = ((step.lse - want[1]).abs() / (1 + want[1].abs()))[seen]
        require(not error.numel() or float(error.max()) <= tolerance(q.dtype), "the LSE")
        require(step.lengths.tolist() == (lengths if planned or not new else held.lengths.tolist()), "lengths")
        self.kept(step, lengths, new is not None)

    def crop(self) -> None:
        """Take tokens back."""
        taken = drawn_crop(self.draw, self.held)
        self.calls.append(f"crop {taken.tolist()}")
        self.held.crop(taken)

    def new(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V."""
        k, v = (drawn_tensor(self.draw, kind, self.batch, tokens, self.spec.attention.kv_heads, self.spec) for kind in self.kinds)
        return k, v


def repeated(step: AnyStep) -> None:
    """Raises Wrong unless the same call over the same cache gives the same bits."""
    again: AnyStep = replace(step)  # type: ignore[type-var]
    again.run()
    for one, other in ((step.out, again.out), (step.lse, again.lse)):
        require(torch.equal(one.view(torch.uint8), other.view(torch.uint8)), "a repeated call gives other bits")
