"""Hypothesis strategies for plans."""

from __future__ import annotations

from hypothesis import strategies as st

from kvgen.verify.plan import PlanShape


@st.composite
def steps(draw: st.DrawFn, window: bool = False) -> tuple[PlanShape, list[int], int, bool]:
    """A shape, lengths of its sequences, a limit of lengths, and whether empty sequences are skipped."""
    tile = draw(st.sampled_from((16, 32, 96, 128)))
    q_len = draw(st.integers(1, 9))
    shape = PlanShape(
        batch=draw(st.integers(1, 7)),
        heads=draw(st.integers(1, 5)),
        workers=draw(st.integers(1, 40)),
        tile_tokens=tile,
        block_tokens=draw(st.sampled_from((16, 32, 128, 512))),
        head_cost=draw(st.integers(0, 4)),
        least_tiles=draw(st.integers(1, 8)),
        window=draw(st.integers(1, 700) if window else st.one_of(st.just(0), st.integers(1, 700))),
        q_len=q_len,
        fresh=draw(st.sampled_from((0, q_len))),
        unpacked=draw(st.one_of(st.just(0), st.integers(0, 600))),
        tile_residual=draw(st.sampled_from((0, 5, 40))),
    )
    lengths = draw(st.lists(lengths_up_to(40 * tile), min_size=shape.batch, max_size=shape.batch))
    return shape, lengths, draw(st.sampled_from((20 * tile, 1 << 20))), draw(st.booleans())


def lengths_up_to(most: int) -> st.SearchStrategy[int]:
    """Tokens of a sequence; none is as likely as all others together are in a batch."""
    return st.one_of(st.just(0), st.integers(0, most))
