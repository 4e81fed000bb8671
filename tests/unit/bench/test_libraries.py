"""torch and FlashInfer as providers: they attend over what they say, and refuse what they cannot."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from kvgen.bench.libraries import FlashInfer, TorchSdpa
from kvgen.bench.run import Case
from kvgen.errors import ToolchainMissing, UnsupportedError
from kvgen.measure.measurement import TimingPolicy
from tests.support.tuning import tiny_spec

POLICY = TimingPolicy(seconds=0.001, warmup_seconds=0.0, samples=5, cold_bytes=0)
LENGTH = 100
"""The last page is not full."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvgen.measure.inputs.cold_bytes", lambda _: 1)


def case(q_len: int = 1, dtype: str = "float32", **attention: object) -> Case:
    heads = {"q_heads": 6, "kv_heads": 2, "head_dim": 32, "dtype": dtype, "q_len": q_len, **attention}
    spec = tiny_spec(attention=heads, workloads=[{"batch": 3, "kv_len": LENGTH, "q_len": q_len}])
    return Case(spec, spec.workloads[0], "cpu", LENGTH)


@pytest.mark.parametrize(("folded", "q_len"), [(False, 1), (True, 1), (False, 3)])
def test_every_form_of_torch_is_the_same_causal_attention(folded: bool, q_len: int) -> None:
    entrant = TorchSdpa("fp32", folded).prepare(case(q_len=q_len))
    assert entrant.error() < 1e-5
    assert entrant.nbytes == 2 * 3 * LENGTH * 2 * 32 * 4
    assert all(sample > 0 for sample in entrant.sample(POLICY))


class Wrapper:
    """What FlashInfer does, by its documentation, in fp32: pages by `indptr` and `indices`, tokens by `last_page_len`."""

    cores: ClassVar[list[bool]] = []

    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool) -> None:
        assert (workspace.dtype, layout) == (torch.uint8, "NHD")
        self.cores.append(use_tensor_cores)

    def plan(self, indptr: Any, indices: Any, last: Any, q_heads: int, kv_heads: int, dim: int, page: int, **named: Any) -> None:
        self.indptr, self.indices, self.last, self.group = indptr.tolist(), indices.long(), last.tolist(), q_heads // kv_heads
        self.shape, self.named = (2, page, kv_heads, dim), named

    def run(self, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        assert cache.shape[1:] == self.shape
        assert (q.dtype, cache.dtype) == (self.named["q_data_type"], self.named["kv_data_type"])
        assert (self.named["window_left"], self.named["logits_soft_cap"]) == (-1, None)
        out = torch.empty_like(q)
        for b, last in enumerate(self.last):
            pages = cache[self.indices[self.indptr[b] : self.indptr[b + 1]]].float()
            length = (len(pages) - 1) * self.shape[1] + last
            k, v = (pages[:, i].flatten(0, 1)[:length].repeat_interleave(self.group, 1) for i in (0, 1))
            scores = torch.einsum("hd,thd->ht", q[b].float(), k) * q.shape[-1] ** -0.5
            out[b] = torch.einsum("ht,thd->hd", scores.softmax(-1), v).to(q.dtype)
        return out


@pytest.mark.parametrize(("fp8", "tensor_cores"), [(False, True), (True, True), (True, False)])
def test_flashinfers_pages_hold_what_everybody_attends_over(fp8: bool, tensor_cores: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    module.__spec__ = ModuleSpec("flashinfer", None)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    entrant = FlashInfer(fp8, tensor_cores).prepare(case(dtype="float16"))
    assert Wrapper.cores.pop() == tensor_cores
    assert entrant.nbytes == 2 * 3 * LENGTH * 2 * 32 * (1 if fp8 else 2), "whole pages would be more"
    assert entrant.error() < 1e-3
    assert min(entrant.sample(POLICY)) > 0
    for asked in (case(q_len=2, dtype="float16"), case(dtype="float32")):
        with pytest.raises(UnsupportedError, match="one query token of a 16-bit type"):
            FlashInfer().prepare(asked)


def test_a_library_that_is_not_installed_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ToolchainMissing, match="flashinfer is not installed"):
        FlashInfer().prepare(case())
