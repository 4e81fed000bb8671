"""The cases of benchmarks/gpu_shapes.py, and lowering them many at once."""

from __future__ import annotations

import time

import pytest

from benchmarks import compiling
from benchmarks.gpu_shapes import beside, with_best
from benchmarks.gpu_words import lengths_of, schedules_of
from benchmarks.shape_cases import SHAPES, TARGET, Shape, named
from kvgen.errors import KvgenError, UnsupportedError
from kvgen.lower.backends import get_backend
from kvgen.lower.base import Source
from kvgen.lower.schedule import Schedule, layout_of
from kvgen.measure.bytes import half_full, must_read

NAMES = {shape.name: shape for shape in SHAPES}


def bytes_of(shape: Shape) -> int:
    layout = layout_of(shape.spec, get_backend("cuda").default(shape.spec, TARGET).layout)
    return must_read(shape.spec, layout, [half_full(shape.spec, layout, length) for length in lengths_of(shape.work)])


def test_siblings_come_first_and_have_as_many_bytes() -> None:
    assert len(NAMES) == len(SHAPES)
    for number, shape in enumerate(SHAPES):
        if shape.sibling is not None:
            assert shape.sibling in [before.name for before in SHAPES[:number]]
            assert bytes_of(shape) == pytest.approx(bytes_of(NAMES[shape.sibling]), rel=0.05)


def test_16_bits_and_what_sink_and_local_tokens_cost_are_measured_at_the_plain_workload() -> None:
    assert (NAMES["16 bits, 8x32768"].spec.key.bits, NAMES["16 bits, 8x32768"].work) == (16, NAMES["plain"].work)
    assert NAMES["sink 32, local 128"].sibling == "plain"
    assert [shape.name for shape in SHAPES if named(shape, "16 bits", SHAPES)] == ["16 bits"]


def test_every_case_has_schedules_on_both_back_ends_or_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """All words fit; pages of 16 tokens are what TileLang refuses."""
    for shape in SHAPES:
        assert len(shape.points("cuda")) == len(shape.cuda)
        assert len(shape.points("tilelang")) == (0 if shape.name == "token, page 16" else len(shape.tilelang))
    (told,) = capsys.readouterr().out.strip().splitlines()
    assert told.startswith("- token, page 16: the tilelang back end does not support this spec: cache.page (16)")


def test_the_best_of_both_stands_beside_the_best_of_its_sibling() -> None:
    def row(case: str, backend: str, us: float, fraction: float) -> dict[str, object]:
        return {"case": case, "backend": backend, "schedule": "w", "us": us, "read_fraction": fraction}

    plain = with_best([row("plain", "tilelang", 70.0, 0.92), row("plain", "cuda", 72.0, 0.9)])
    assert [one["backend"] for one in plain] == ["cuda", "tilelang", "best"]
    assert plain[2]["schedule"] == "tilelang w"
    rows = {(one["case"], one["backend"]): one for one in plain}
    paged = with_best([row("page 128", "cuda", 71.0, 0.89), row("page 128", "tilelang", 75.0, 0.85)])
    assert [beside(one, rows)["relative"] for one in paged] == [round(0.89 / 0.9, 4), round(0.85 / 0.92, 4), round(0.89 / 0.92, 4)]
    assert beside(plain[0], {}) == {"sibling": "", "relative": ""}


def test_equal_kernels_are_lowered_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that only the first of them starts TileLang; an error is a result."""
    running: set[Schedule] = set()
    cuda = get_backend("cuda")

    class Slow:
        def lower(self, spec: object, schedule: Schedule, target: str) -> Source:
            assert schedule not in running
            running.add(schedule)
            time.sleep(0.02)
            running.remove(schedule)
            if schedule.launch["warps"] == 16:
                raise UnsupportedError("slow", "16 warps")
            return Source(str(schedule.launch), "cuda", "sm90")

    points = [(NAMES[name].spec, schedules_of(word, cuda, NAMES[name].spec, TARGET)[0])
              for name in ("plain", "7 of 5120", "13 of 20000") for word in ("w8u4d1", "w16u2d1")]  # fmt: skip
    monkeypatch.setattr(compiling, "get_backend", lambda name: Slow())
    found = compiling.lower_all(points, TARGET, 4)
    assert found[0] == found[2] == found[4]
    assert isinstance(found[0], Source)
    assert all(isinstance(one, KvgenError) for one in found[1::2])
