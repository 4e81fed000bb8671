from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from kvgen.bench.case import Case
from kvgen.bench.flashinfer import PAGE, FlashInfer
from kvgen.errors import ToolchainMissing, UnsupportedError
from kvgen.measure.job import TimingPolicy
from tests.support.tuning import tiny_spec

LENGTH = 100  # the last page is not full


class Wrapper:
    """What the library does, by its documentation, in fp32: pages by `indptr` and `indices`, tokens by `last_page_len`."""

    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool) -> None:
        assert (workspace.dtype, layout, use_tensor_cores) == (torch.uint8, "NHD", True)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last: torch.Tensor,
        q_heads: int,
        kv_heads: int,
        dim: int,
        page: int,
        **named: Any,
    ) -> None:
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


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    module.__spec__ = ModuleSpec("flashinfer", None)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr("kvgen.bench.flashinfer.cold_bytes", lambda _: 1)


def case(q_len: int = 1, dtype: str = "float16") -> Case:
    heads = {"q_heads": 6, "kv_heads": 2, "head_dim": 32, "dtype": dtype, "q_len": q_len}
    spec = tiny_spec(attention=heads, workloads=[{"batch": 3, "kv_len": LENGTH, "q_len": q_len}])
    return Case(spec, spec.workloads[0], "cpu", LENGTH)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.usefixtures("library")
def test_pages_hold_what_everybody_attends_over(fp8: bool) -> None:
    provider, asked = FlashInfer(fp8), case()
    entrant = provider.prepare(asked)
    assert provider.backend == ("batch-decode-fp8" if fp8 else "batch-decode")
    assert entrant.nbytes == 2 * 3 * LENGTH * 2 * 32 * (1 if fp8 else 2), f"whole pages of {PAGE} would be more"
    assert entrant.error() < 1e-3
    assert min(entrant.sample(TimingPolicy(seconds=0.001, warmup_seconds=0.0, samples=5, cold_bytes=0))) > 0


@pytest.mark.usefixtures("library")
def test_what_it_has_no_kernel_for_is_refused() -> None:
    for asked in (case(q_len=2), case(dtype="float32")):
        with pytest.raises(UnsupportedError, match="one query token of a 16-bit type"):
            FlashInfer().prepare(asked)


def test_its_absence_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ToolchainMissing, match="not installed"):
        FlashInfer().prepare(case())
