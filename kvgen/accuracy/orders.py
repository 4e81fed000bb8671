"""The papers' orders of formats, each beside what a table says of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvgen.accuracy.row import Row, longest
from kvgen.plaindata import Json

COMES_OUT, CONTRADICTED, OPEN = "comes out", "contradicted", "not told apart"


@dataclass(frozen=True)
class Close:
    """A claim that a format is as good as an unquantized cache: perplexity rises by less than `limit`."""

    claim: str
    format: str
    limit: float

    @property
    def formats(self) -> tuple[str, ...]:
        return (self.format,)


@dataclass(frozen=True)
class Better:
    """A claim that the predictions over one format are nearer to those over an unquantized cache than over another."""

    claim: str
    better: str
    worse: str

    @property
    def formats(self) -> tuple[str, ...]:
        return self.better, self.worse


CLAIMS: tuple[Close | Better, ...] = (
    Close("8 bits per channel are as good as 16 (the INT8 paper, 7.3)", "int8-per-channel", 0.001),
    Close("8 bits per token are as good as 16 (TurboMind)", "turbomind-int8", 0.001),
    Close("4 bits are close to 16 (BitDecoding)", "bitdecoding-int4", 0.01),
    Better("K needs the bits more than V: K4V2 before K2V4 (Kitty, 3.1)", "k4v2", "k2v4"),
    Better("K per channel before K per token, under outlier channels (KIVI; BitDecoding, 2.2)", "bitdecoding-int4", "turbomind-int4"),
    Better("smaller groups help: KIVI's of 32 before those of 128", "kivi-int2", "bitdecoding-int2"),
    Better("unquantized first tokens help a 2-bit cache (Kitty, 3.1)", "kitty-unboosted", "bitdecoding-int2"),
    Better("boosted channels help, at the same sink and local tokens (Kitty, 5.4)", "kitty", "kitty-unboosted"),
    Better("Kitty before KIVI-2, at groups of 128 (Kitty, 5.2)", "kitty", "bitdecoding-int2"),
    Better("Kitty-Pro before Kitty (Kitty, 5.2)", "kitty-pro", "kitty"),
    Better("channels chosen by their mean before fixed ones, 12.5 % (Kitty, 5.4)", "kitty", "kitty-static"),
    Better("channels chosen by their mean before fixed ones, 25 % (Kitty, 5.4)", "kitty-pro", "kitty-pro-static"),
)


@dataclass(frozen=True)
class Order(Json):
    """A claim, what was measured, and the result."""

    claim: str
    measured: str
    result: str


def orders(rows: Iterable[Row]) -> list[Order]:
    """The claims whose formats are all in a table, at its largest length."""
    by_name = {row.name: row for row in longest(rows)}
    return [_judged(claim, by_name) for claim in CLAIMS if by_name.keys() >= set(claim.formats)]


def _judged(claim: Close | Better, rows: dict[str, Row]) -> Order:
    """A difference within two standard errors is none. Errors add up as if both were independent, which is cautious."""
    if isinstance(claim, Close):
        row = rows[claim.format]
        measured = (
            f"perplexity {row.increase:+.3%} ± {row.increase_error:.3%}, agreement {row.agreement:.2%}; the limit is {claim.limit:.1%}"
        )
        return Order(claim.claim, measured, _result(claim.limit - row.increase, row.increase_error))
    better, worse = rows[claim.better], rows[claim.worse]
    measured = f"`{better.name}` {_divergence(better)}, `{worse.name}` {_divergence(worse)}"
    error = math.hypot(better.divergence_error, worse.divergence_error)
    return Order(claim.claim, measured, _result(worse.divergence - better.divergence, error))


def _result(by: float, error: float) -> str:
    return OPEN if abs(by) <= 2 * error else COMES_OUT if by > 0 else CONTRADICTED


def _divergence(row: Row) -> str:
    return f"{1000 * row.divergence:.3g} ± {1000 * row.divergence_error:.2g}"
