"""A few random lives of the long checks `tests.lives.cpu` and `tests.lives.emulated`, and what their generators can draw."""

from __future__ import annotations

from random import Random

import pytest

from kvgen.spec import KernelSpec, load_spec
from tests.lives import cpu, emulated
from tests.lives.drawn import spec_data


@pytest.mark.parametrize("number", [1, 10])
def test_lives_on_the_cpu_are_those_of_the_reference(number: int) -> None:
    assert cpu.lives(number, 3) == []


@pytest.mark.slow
def test_an_emulated_life_is_that_of_the_reference() -> None:
    assert emulated.lives(4, 2) == []


def test_every_kind_of_value_is_drawn() -> None:
    """A value that is never drawn is never tested."""
    draw = Random(0)
    specs = [load_spec(spec_data(draw)) for _ in range(600)]
    assert all(isinstance(spec, KernelSpec) for spec in specs)

    def drawn(section: str, field: str) -> set[object]:
        return {getattr(getattr(spec, section), field) for spec in specs}

    assert drawn("attention", "dtype") == {"float16", "bfloat16", "float32"}
    assert drawn("attention", "sinks") == drawn("key", "zero") == drawn("value", "zero") == {False, True}
    for operand in ("key", "value"):
        assert drawn(operand, "bits") == {2, 4, 8, 16}
        assert {(getattr(spec, operand).axis, getattr(spec, operand).group) for spec in specs} >= {
            ("channel", 16),
            ("channel", 512),
            ("token", 1),
        }
    assert {spec.key.boost.select for spec in specs if spec.key.boost.fraction} == {"mean_abs", "range", "static"}
    assert {16 * n for n in range(1, 17)} < drawn("attention", "head_dim")
    assert max(dim for dim in drawn("attention", "head_dim") if isinstance(dim, int)) > 256
    assert {None, 1} < drawn("attention", "window")
    assert {None, 16} < drawn("cache", "page")
    assert all(len(drawn("cache", part)) > 10 for part in ("sink", "local", "rollback"))
    assert any(spec.attention.window and spec.cache.local and spec.cache.rollback and not spec.cache.page for spec in specs)
    assert any(spec.attention.group * spec.attention.q_len > 128 for spec in specs)
