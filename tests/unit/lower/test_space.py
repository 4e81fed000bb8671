"""Search spaces: which points they give, and why they withhold others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgen.lower import space
from kvgen.lower.constraints import RULES, Rule, Rules
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.space import Parameter, SearchSpace
from kvgen.spec import Workload

Told = tuple[str, Callable[[Any], bool]]


def make(constraints: list[Told], hints: list[Told] | None = None, **facts: Any) -> SearchSpace:
    parameters = [
        Parameter("block", "layout", (32, 64, 128), "tokens per block"),
        Parameter("tile", "launch", (16, 32, 64), "tokens per tile"),
        Parameter("copy", "launch", ("direct", "staged"), "how bytes travel", {"direct": "straight", "staged": "by way of a buffer"}),
    ]
    works = (Workload(batch=1, kv_len=1024), Workload(batch=8, kv_len=64))
    rules, advice = ([Rule(*one) for one in given] for given in (constraints, hints or []))
    return SearchSpace("toy", parameters, rules, facts, works, advice)


def test_hints_narrow_what_is_searched_and_refuse_nothing() -> None:
    """Hints on layouts, on launches, and on workloads; a constraint beside them."""
    space = make(
        [("a tile ({tile}) lies in a block ({block})", lambda p: p.tile <= p.block)],
        [
            ("blocks of {block} gained nothing", lambda p: p.block < 128),
            ("staging gained nothing", lambda p: p.copy == "direct"),
            ("wide tiles lose with one sequence", lambda p: p.batch > 1 or p.tile == 16),
        ],
    )
    assert {(s.layout["block"], s.launch["tile"]) for s in space.schedules()} == {(32, 16), (32, 32), (64, 16), (64, 32), (64, 64)}
    hinted_against = Schedule("toy", Params(block=128), Params(tile=32, copy="staged"))
    alone = space.workloads[0]
    assert space.check(hinted_against, alone) == []
    assert space.doubts(hinted_against) == ["blocks of 128 gained nothing", "staging gained nothing"]
    assert space.doubts(hinted_against, alone)[2:] == ["wide tiles lose with one sequence"]
    assert hinted_against in set(space.without_hints().schedules())
    excluded, unsearched = list(space.excluded()), list(space.excluded(hints=True))
    assert {reason for _, reasons in excluded for reason in reasons} == {"a tile (64) lies in a block (32)"}
    assert (len(excluded), len(unsearched), space.raw_size - space.size) == (2, 11, 13)
    assert ["blocks of 128 gained nothing"] in [reasons for _, reasons in unsearched]


def test_constraints_see_facts_and_functions_and_give_their_reason_once_for_a_layout() -> None:
    holds = ("needs {tile} x {block}", lambda p: p.bytes_of(p.block, p.tile) <= p.limit)
    space = make(
        [("a block ({block}) holds whole groups ({group})", lambda p: p.block % p.group == 0), holds],
        group=64,
        limit=2048,
        bytes_of=lambda a, b: a * b,
    )
    assert [p["block"] for p in space.layouts()] == [64, 128]
    assert {p["tile"] for p in space.launches(Params(block=128), space.workloads[0])} == {16}
    excluded = list(space.excluded())
    assert excluded[0] == (Schedule("toy", Params(block=32), Params(tile=16, copy="direct")), ["a block (32) holds whole groups (64)"])
    assert {reason for _, found in excluded[6:] for reason in found} == {"needs 32 x 128", "needs 64 x 128", "needs 64 x 64"}


def test_workload_constraints_depend_on_the_workload_and_one_that_allows_is_enough_for_a_point() -> None:
    space = make(
        [
            ("small tiles for one sequence", lambda p: p.batch > 1 or p.tile == 16),
            ("no wide tile over 64 tokens", lambda p: p.kv_len > 64 or p.tile != 64),
        ]
    )
    alone, many = space.workloads
    assert {p["tile"] for p in space.launches(Params(block=32), alone)} == {16}
    assert {p["tile"] for p in space.launches(Params(block=32), many)} == {16, 32}
    assert {s.launch["tile"] for s in space.schedules()} == {16, 32}
    wide = Schedule("toy", Params(block=32), Params(tile=32, copy="direct"))
    assert space.check(wide) == []
    assert space.check(wide, alone) == ["small tiles for one sequence"]


def test_check_names_unknown_missing_and_foreign_values() -> None:
    space = make([])
    assert space.check(Schedule("cuda", Params(), Params())) == ["the schedule is for cuda, the space for toy"]
    found = space.check(Schedule("toy", Params(block=48), Params(tile=16, warp=2)))
    assert found == ["block = 48 is not one of 32, 64, 128", "launch parameter warp is not known", "launch parameter copy is missing"]


def test_files_have_parameters_with_values_and_meanings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "toy.yaml").write_text(
        "{layout: {block: {doc: tokens, values: [1, 2], times: least}}, launch: {tile: {doc: tokens, values: {16: small, 32: wide}}}}"
    )
    monkeypatch.setattr(space, "search_spaces", lambda: tmp_path)
    monkeypatch.setitem(RULES, "toy", Rules((Rule("small", lambda p: p.block > p.least),)))
    found = SearchSpace.load("toy", {"least": 20}, ())
    assert (found.parameters[0].values, found.size) == ((20, 40), 2)
    hints = Rules(hints=(Rule("wide", lambda p: p.tile < 32),), measured=("sm90",))
    monkeypatch.setitem(RULES, "toy", hints)
    assert [SearchSpace.load("toy", {"least": 20, "target": one}, ()).searched.size for one in ("sm90", "sm80")] == [2, 4]
    assert found.parameters[1].docs == {16: "small", 32: "wide"}


def test_fifty_thousand_points_are_judged_once_per_combination_of_what_a_constraint_reads() -> None:
    calls = 0

    def costly(a: int, b: int) -> bool:
        nonlocal calls
        calls += 1
        return a != b

    parameters = [Parameter(f"p{i}", "launch", tuple(range(15)), "") for i in range(4)]
    space = SearchSpace("toy", parameters, [Rule("equal", lambda p: p.costly(p.p0, p.p1))], {"costly": costly})
    assert space.size == 15**4 - 15**3
    assert calls == 15**2
