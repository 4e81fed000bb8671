"""ONNX Runtime as a provider: its codes, its refusals; its result where it is installed."""

from __future__ import annotations

import pytest
import torch

from kvgen.bench.case import Case
from kvgen.bench.onnx_gqa import OnnxGqa, _Codes
from kvgen.errors import ToolchainMissing, UnsupportedError
from kvgen.measure.job import TimingPolicy
from kvgen.spec import Workload
from tests.support.cpu import spec_of

WORK = Workload(batch=2, kv_len=70)


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_read_back_to_half_a_step_and_lie_by_heads(bits: int) -> None:
    x = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(1))
    codes = _Codes(x, bits)
    assert ((codes.read_back() - x).abs() <= codes.scale / 2 * 1.001).all()
    assert codes.packed.shape == (2, 3, 5, 8 * bits // 8)
    first = codes.packed[1, 2, 4]
    if bits == 4:
        first = torch.stack([first & 15, first >> 4], -1).flatten().to(torch.int8) - 8
    assert torch.equal(first, codes.codes[1, 4, 2])


def test_without_it_the_line_to_type_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvgen.extras.find_spec", lambda _: None)
    with pytest.raises(ToolchainMissing, match=r"pip install 'kvgen\[onnxruntime\]'"):
        OnnxGqa(8).prepare(Case(spec_of(), WORK, "cpu", 70))


def test_what_it_is_not_asked_to_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvgen.bench.onnx_gqa.require", lambda *_: None)
    several = Case(spec_of(q_len=4), Workload(batch=1, kv_len=70, q_len=4), "cpu", 70)
    for case in (several, Case(spec_of(sinks=True), WORK, "cpu", 70)):
        with pytest.raises(UnsupportedError, match="rows are for one query token, without sinks"):
            OnnxGqa(4).prepare(case)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("parts", [{}, {"window": 33, "softcap": 5.0}], ids=["plain", "window"])
def test_it_attends_over_its_codes(bits: int, parts: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    monkeypatch.setattr("kvgen.bench.onnx_gqa.cold_bytes", lambda _: 1)
    entrant = OnnxGqa(bits).prepare(Case(spec_of(**parts), WORK, "cpu", 70))
    assert entrant.nbytes == 2 * 2 * 70 * 2 * 64 * bits // 8
    assert entrant.error() < 1e-5
    assert min(entrant.sample(TimingPolicy(seconds=0.001, warmup_seconds=0.0, samples=2))) > 0
