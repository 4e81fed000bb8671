"""Search spaces: which points they give, and why they withhold others."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from kvgen.errors import KvgenError
from kvgen.lower import space
from kvgen.lower.expression import Expression
from kvgen.lower.schedule import Params, Schedule
from kvgen.lower.space import Constraint, Parameter, SearchSpace
from kvgen.spec import Workload


def make(constraints: list[tuple[str, str]], hints: list[tuple[str, str]] | None = None, **facts: object) -> SearchSpace:
    parameters = [
        Parameter("block", "layout", (32, 64, 128), "tokens per block"),
        Parameter("tile", "launch", (16, 32, 64), "tokens per tile"),
        Parameter("copy", "launch", ("direct", "staged"), "how bytes travel", {"direct": "straight", "staged": "by way of a buffer"}),
    ]
    works = (Workload(batch=1, kv_len=1024), Workload(batch=8, kv_len=64))
    rules, advice = ([Constraint(Expression(e), r) for e, r in given] for given in (constraints, hints or []))
    return SearchSpace("toy", parameters, rules, facts, works, advice)  # type: ignore[arg-type]


def test_hints_narrow_what_is_searched_and_refuse_nothing() -> None:
    """Hints on layouts, on launches, and on workloads; a constraint beside them."""
    space = make(
        [("tile <= block", "a tile ({tile}) lies in a block ({block})")],
        [
            ("block < 128", "blocks of {block} gained nothing"),
            ("copy == 'direct'", "staging gained nothing"),
            ("batch > 1 or tile == 16", "wide tiles lose with one sequence"),
        ],
    )
    assert {(s.layout["block"], s.launch["tile"]) for s in space.schedules()} == {(32, 16), (32, 32), (64, 16), (64, 32), (64, 64)}
    hinted_against = Schedule("toy", Params(block=128), Params(tile=32, copy="staged"))
    alone = space.workloads[0]
    assert space.check(hinted_against, alone) == []
    assert space.doubts(hinted_against) == ["blocks of 128 gained nothing", "staging gained nothing"]
    assert space.doubts(hinted_against, alone)[2:] == ["wide tiles lose with one sequence"]
    assert hinted_against in set(space.without_hints().schedules())
    excluded, unsearched = list(space.excluded()), list(space.unsearched())
    assert {reason for _, reasons in excluded for reason in reasons} == {"a tile (64) lies in a block (32)"}
    assert [(point, reasons) for point, reasons in unsearched if len(point) == 1] == [(Params(block=128), ["blocks of 128 gained nothing"])]
    assert len(unsearched) == 1 + 5
    assert not {point for point, _ in excluded} & {point for point, _ in unsearched}


def test_a_space_without_constraints_is_the_product_in_file_order() -> None:
    space = make([])
    points = list(space.schedules())
    assert space.size == space.raw_size == len(points) == 18
    assert points[0] == Schedule("toy", Params(block=32), Params(tile=16, copy="direct"))
    assert len(set(points)) == 18
    assert list(space.excluded()) == []


def test_layout_constraints_cut_layouts_and_give_their_reason_once() -> None:
    space = make([("block % group == 0", "a block ({block}) holds whole groups ({group})")], group=64)
    assert [p["block"] for p in space.layouts()] == [64, 128]
    assert list(space.excluded()) == [(Params(block=32), ["a block (32) holds whole groups (64)"])]


def test_launch_constraints_see_layout_facts_and_functions() -> None:
    space = make([("bytes_of(block, tile) <= limit", "needs {tile} x {block}")], limit=2048, bytes_of=lambda a, b: a * b)
    works = space.workloads
    assert {p["tile"] for p in space.launches(Params(block=128), works[0])} == {16}
    assert {p["tile"] for p in space.launches(Params(block=32), works[0])} == {16, 32, 64}
    reasons = {reason for _, found in space.excluded() for reason in found}
    assert reasons == {"needs 32 x 128", "needs 64 x 128", "needs 64 x 64"}


def test_workload_constraints_depend_on_the_workload_and_one_that_allows_is_enough_for_a_point() -> None:
    space = make(
        [("batch > 1 or tile == 16", "small tiles for one sequence"), ("kv_len > 64 or tile != 64", "no wide tile over 64 tokens")]
    )
    alone, many = space.workloads
    assert {p["tile"] for p in space.launches(Params(block=32), alone)} == {16}
    assert {p["tile"] for p in space.launches(Params(block=32), many)} == {16, 32}
    assert {s.launch["tile"] for s in space.schedules()} == {16, 32}
    wide = Schedule("toy", Params(block=32), Params(tile=32, copy="direct"))
    assert space.check(wide) == []
    assert space.check(wide, alone) == ["small tiles for one sequence"]


def test_points_and_excluded_part_the_raw_space() -> None:
    space = make([("block >= 64", "a"), ("tile <= block // 2", "b"), ("copy == 'direct' or tile > 16", "c")])
    good = {(s.layout["block"], s.launch["tile"], s.launch["copy"]) for s in space.schedules()}
    bad = list(space.excluded())
    whole_layouts = sum(6 for point, _ in bad if "tile" not in point)
    assert len(good) + whole_layouts + sum(1 for point, _ in bad if "tile" in point) == space.raw_size
    for point, reasons in bad:
        assert reasons
        if "tile" in point:
            assert space.check(Schedule("toy", Params(block=point["block"]), Params(tile=point["tile"], copy=point["copy"]))) == reasons


def test_check_names_unknown_missing_and_foreign_values() -> None:
    space = make([])
    assert space.check(Schedule("cuda", Params(), Params())) == ["the schedule is for cuda, the space for toy"]
    found = space.check(Schedule("toy", Params(block=48), Params(tile=16, warp=2)))
    assert found == ["block = 48 is not one of 32, 64, 128", "launch parameter warp is not known", "launch parameter copy is missing"]


def test_values_are_multiplied_by_a_fact() -> None:
    block = Parameter("block", "layout", (16, 32), "tokens", times="factor")
    assert block.of_facts({"factor": 3}).values == (48, 96)
    assert block.of_facts({"factor": 3}).of_facts({}).values == (48, 96)
    with pytest.raises(KvgenError, match="block is multiplied by factor, which is no fact"):
        block.of_facts({})


def test_unknown_names_and_unsafe_expressions_are_refused() -> None:
    with pytest.raises(KvgenError, match="mentions unknown blok"):
        make([("blok > 1", "typo")])
    for text in ("block.__class__", "[x for x in (1,)]", "lambda: 1", "block[0]"):
        with pytest.raises(SyntaxError):
            Expression(text)
    with pytest.raises(NameError):
        Expression("open('x')")({})


def test_a_file_is_parsed_once_whatever_the_spec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parsed: list[str] = []

    class Counting(Expression):
        def __init__(self, text: str) -> None:
            parsed.append(text)
            super().__init__(text)

    (tmp_path / "toy.yaml").write_text(
        "{backend: toy, layout: {block: {doc: tokens, values: [32, 64]}}, launch: {tile: {doc: tokens, values: {16: small, 32: wide}}},"
        " constraints: [{require: block > least, reason: small}]}"
    )
    monkeypatch.setattr(space, "search_spaces", lambda: tmp_path)
    monkeypatch.setattr(space, "Expression", Counting)
    spaces = [SearchSpace.load("toy", {"least": least}, ()) for least in (0, 40)]
    assert [found.size for found in spaces] == [4, 2]
    assert parsed == ["block > least"]
    assert spaces[1].parameters[1].docs == {16: "small", 32: "wide"}
    (tmp_path / "bad.yaml").write_text("backend: toy")
    with pytest.raises(KvgenError, match=r"search space bad.yaml cannot be read: 'layout'"):
        SearchSpace.load("bad", {}, ())


def test_to_json_is_plain_data() -> None:
    data = json.loads(json.dumps(make([("block >= 64", "why")], limit=3, f=len).to_json()))
    assert data["size"] == 12
    assert data["raw_size"] == 18
    assert data["facts"] == {"limit": 3}
    assert data["parameters"][2]["docs"]["staged"] == "by way of a buffer"
    assert data["constraints"] == [{"require": "block >= 64", "reason": "why"}]


def test_fifty_thousand_points_are_judged_once_per_combination_of_what_a_constraint_mentions() -> None:
    calls = 0

    def costly(a: int, b: int) -> bool:
        nonlocal calls
        calls += 1
        return a != b

    parameters = [Parameter(f"p{i}", "launch", tuple(range(15)), "") for i in range(4)]
    space = SearchSpace("toy", parameters, [Constraint(Expression("costly(p0, p1)"), "equal")], {"costly": costly})
    start = time.process_time()
    assert space.size == 15**4 - 15**3
    print(f"{space.raw_size} points in {time.process_time() - start:.2f} s")
    assert calls == 15**2
