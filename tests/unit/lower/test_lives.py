"""A few random lives of the long checks `python -m tests.lives.cpu`, `emulated`, `tilelang`, `matrix`, and what their generators draw."""

from __future__ import annotations

from random import Random

import pytest
import torch

from kvgen.arch import GPUS
from kvgen.lower.backend import get_backend
from kvgen.spec import KernelSpec, load_spec
from kvgen.verify import matrix as reference
from tests.lives import cpu, emulated, matrix, tilelang
from tests.lives.drawn import drawn_tilelang_schedule, drawn_tilelang_spec, spec_data
from tests.lives.drawn_matrix import KINDS, drawn_matrix, drawn_matrix_schedule, drawn_matrix_spec, drawn_rows, drawn_scales, drawn_shape
from tests.support.tilelang import needs_tilelang


@pytest.mark.parametrize("number", [1, 10])
def test_lives_on_the_cpu_are_those_of_the_reference(number: int) -> None:
    assert cpu.lives(number, 3) == []


@pytest.mark.slow
def test_an_emulated_life_is_that_of_the_reference() -> None:
    assert emulated.lives(4, 2) == []


@pytest.mark.parametrize("number", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_lives_of_a_matrix_are_those_of_the_reference(number: int) -> None:
    """On the CPU, and in the emulator."""
    assert matrix.lives(number, 2) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_life_of_a_tilelang_program_is_that_of_the_reference() -> None:
    needs_tilelang()
    assert tilelang.lives(32, 1) == []


class Off:
    """Operations on a matrix of which one result is wrong."""

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong

    def scales(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(reference.scales(x[:-1] if self.wrong == "last row" else x))

    def quantize(self, x: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        codes.copy_(reference.codes(x, scales))
        if self.wrong == "one code beyond" and codes.numel():
            codes.as_strided((1,), (1,), codes[-1:, -1:].storage_offset() + 1).fill_(1)

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        exact = reference.dequantized(codes, scales, out.dtype)
        out.copy_(codes.to(out.dtype) * scales.to(out.dtype) if self.wrong == "16 bits" else exact)


@pytest.mark.parametrize("wrong", ["", "last row", "one code beyond", "16 bits"])
def test_lives_of_a_matrix_find_what_is_wrong(wrong: str) -> None:
    found = matrix.failures(0, 40, "named", lambda draw: matrix.MatrixLife(Off(wrong), torch.float16, (3000, 1), draw))
    assert bool(found) == bool(wrong)


def test_every_kind_of_matrix_is_drawn() -> None:
    draw = Random(0)
    specs = [drawn_matrix_spec(draw) for _ in range(400)]
    assert {(spec.operation, spec.matrix.dtype, target) for spec, target in specs} == {
        (operation, dtype, target)
        for operation in ("quantize", "dequantize")
        for dtype in ("float32", "float16", "bfloat16")
        for target in ("cpu", *GPUS)
    }
    for target in ("cpu", "cuda"):
        launches = [drawn_matrix_schedule(draw, spec, of).launch for spec, of in specs if (of == "cpu") == (target == "cpu")]
        space = get_backend(target).space(*next(pair for pair in specs if (pair[1] == "cpu") == (target == "cpu")))
        assert all({launch[p.name] for launch in launches} == set(p.values) for p in space.parameters)
    shapes = {drawn_shape(draw, 3000, 1) for _ in range(200)}
    assert {tokens for tokens, _ in shapes} >= {0, 1, 2}
    assert any(tokens * channels > 2000 for tokens, channels in shapes)
    for kind in KINDS:
        data = [drawn_matrix(draw, kind, *drawn_shape(draw, 500, 1), dtype) for dtype in (torch.float32, torch.float16) for _ in range(40)]
        strides = {(x.view.stride(0) > x.view.shape[1]) - (x.view.stride(0) < x.view.shape[1]) for x in (drawn_rows(draw, y) for y in data)}
        assert strides == {-1, 0, 1}
        assert all(bool(x.isfinite().all() and drawn_scales(draw, x).isfinite().all()) for x in data)


def test_every_kind_of_tilelang_program_is_drawn() -> None:
    draw = Random(0)
    specs = [drawn_tilelang_spec(draw) for _ in range(150)]
    launches = [drawn_tilelang_schedule(draw, spec).launch for spec in specs]
    assert {spec.attention.head_dim for spec in specs} == {32, 64, 96, 128}
    assert {spec.key.bits for spec in specs} == {spec.value.bits for spec in specs} == {2, 4, 8}
    assert {spec.key.axis for spec in specs} == {"channel", "token"}
    assert {bool(spec.cache.page) for spec in specs} == {False, True}
    space = get_backend("tilelang").space(specs[0], "sm90")
    for parameter in space.parameters:
        if parameter.part == "launch":
            assert {launch[parameter.name] for launch in launches} == set(parameter.values)


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
