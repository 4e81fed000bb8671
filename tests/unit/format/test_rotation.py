"""The rotation of K and V against its matrix, and its field in a spec."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvgen.errors import SpecError
from kvgen.format.layout import Rotation, packed_layout
from kvgen.format.rotation import rotate, rotate_back, signs
from tests.support.cpu import spec_of


@pytest.mark.parametrize("rotation", [Rotation(64, True), Rotation(16, False)], ids=str)
def test_it_is_a_hadamard_matrix_of_every_block_after_signs(rotation: Rotation) -> None:
    pair, block = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    while len(block) < rotation.block:
        block = torch.kron(pair, block)
    matrix = torch.block_diag(*[block] * (64 // rotation.block)) / rotation.block**0.5
    if rotation.signs:
        matrix = torch.tensor(signs(64), dtype=torch.float64)[:, None] * matrix
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(rotate(x, rotation), x @ matrix, rtol=1e-12)
    assert torch.allclose(rotate_back(x, rotation), x @ matrix.T, rtol=1e-12)


def test_signs_are_the_published_ones() -> None:
    assert [sum(1 << i for i in range(32) if signs(256)[32 * w + i] < 0) for w in (0, 1, 7)] == [3801322233, 2953834320, 4239734509]


def test_formats_of_one_rotation_are_one_and_others_are_not() -> None:
    plain, rotated, unsigned = (spec_of(k=f"4t64{words}") for words in ("", "~64", "~64u"))
    whole = replace(rotated, key=replace(rotated.key, rotate="hadamard"))
    assert whole.format_id == rotated.format_id
    assert len({spec.format_id for spec in (plain, rotated, unsigned)}) == 3
    assert len({packed_layout(spec, 32, "mma").id for spec in (plain, rotated, unsigned)}) == 3, "a kernel refuses the others' caches"


@pytest.mark.parametrize(
    ("rotate_", "bits", "reason"),
    [
        ("fourier", 4, "must be hadamard, or a mapping"),
        ({"block": 48}, 4, "must be one of 16, 32, 64, 128, 256, not 48"),
        ({"block": 128}, 4, "must divide head_dim"),
        ("hadamard", 16, "spreads outliers before codes are made"),
    ],
)
def test_a_rotation_that_cannot_be_is_refused(rotate_: object, bits: int, reason: str) -> None:
    spec = spec_of(k="4t64")
    with pytest.raises(SpecError, match=reason):
        replace(spec, key=replace(spec.key, bits=bits, rotate=rotate_))
