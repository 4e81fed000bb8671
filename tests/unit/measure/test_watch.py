from __future__ import annotations

from kvgen.measure.watch import Watch

MIB = 1 << 20


def watch() -> Watch:
    made = Watch(100 * MIB, 1000 * MIB)
    made.base = 50 * MIB
    return made


def test_growth_before_a_stretch_is_not_the_candidates() -> None:
    eye = watch()
    eye.count(900 * MIB)
    eye.tell({"resident": 900 * MIB, "left": 100 * MIB})
    assert not eye.exceeds(1000 * MIB)
    eye.count(970 * MIB)
    assert not eye.over
    assert eye.verdict is None
    assert eye.exceeds(1001 * MIB)
    eye.count(1001 * MIB)
    assert eye.over
    assert eye.verdict == "it used up 100 MiB of host memory"


def test_what_earlier_calls_left_counts() -> None:
    eye = watch()
    eye.tell({"resident": 200 * MIB, "left": 10 * MIB})
    assert eye.exceeds(211 * MIB)
    eye.count(211 * MIB)
    assert eye.over


def test_who_died_near_the_limit_died_of_it() -> None:
    eye = watch()
    eye.tell({"resident": 200 * MIB, "left": 100 * MIB})
    eye.count(285 * MIB)
    assert not eye.over
    assert eye.verdict is not None
    eye.renew()
    assert eye.verdict is None


def test_between_stretches_only_the_ceiling_binds() -> None:
    eye = watch()
    eye.tell({"resident": 200 * MIB, "left": 100 * MIB})
    eye.tell(None)
    assert not eye.exceeds(1050 * MIB)
    assert eye.exceeds(1051 * MIB)
    eye.count(1051 * MIB)
    assert eye.over
    assert eye.verdict == "its process used up all 1000 MiB of host memory that were free"


def test_nothing_is_watched_before_the_process_is_ready() -> None:
    eye = Watch(MIB, MIB)
    eye.count(100 * MIB)
    assert not eye.exceeds(100 * MIB)
    assert not eye.over
