"""The example of docs/kernels.md, ALiBi as a score modifier: the page's own text, emulated, against the formula in fp64."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_words import spec_of, workload_of
from kvgen.lower.base import Source
from kvgen.reference.cache import ReferenceCache
from kvgen.reference.data import normal
from kvgen.reference.tolerance import relative_l2, tolerance
from tests.unit.lower_cuda import emulate_attend
from tests.unit.lower_cuda.emulate_attend import Emulated, Step, launch

PAGE = Path(__file__).resolve().parents[3] / "docs" / "kernels.md"
LENGTHS = (700, 0, 127, 300)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    """A kernel of 8 query heads with the page's header, and the page's two lines of change."""
    spec = spec_of("k4v4:h8/2:kg64:q2", "sm90", [workload_of("2x256")])
    header = re.search(r"```cpp\n#pragma once\n(.*?struct Alibi.*?)```", PAGE.read_text(), re.DOTALL)
    assert header is not None
    rendered = emulate_attend.source

    def with_alibi(*arguments: object) -> Source:
        source = rendered(*arguments)  # type: ignore[arg-type]
        assert source.text.count("kvgen::NoModifier") == 1
        return Source(source.text.replace("kvgen::NoModifier", "kvgen::Alibi<8>"), source.language, source.target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulate_attend, "source", with_alibi)
        patch.setattr(emulate_attend, "seams", lambda _: header[1])
        return Emulated(spec, 64, launch(), tmp_path_factory.mktemp("alibi"))


def alibi(held: ReferenceCache, q: torch.Tensor) -> torch.Tensor:
    """Attention whose scores lose 2^-(h + 1) of the distance between query and token."""
    k, v = held.keys_values()
    heads, q_len, group = q.shape[2], q.shape[1], q.shape[2] // k.shape[2]
    out = torch.zeros(q.shape, dtype=torch.float64)
    slope = (2.0 ** -torch.arange(1, heads + 1, dtype=torch.float64))[:, None, None]
    for b, length in enumerate(held.lengths.tolist()):
        keys, values = (x[b, :length].double().repeat_interleave(group, 1) for x in (k, v))
        distance = torch.arange(length - q_len, length)[:, None] - torch.arange(length)
        scores = torch.einsum("qhd,thd->hqt", q[b].double(), keys) * q.shape[-1] ** -0.5 - slope * distance
        weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1).nan_to_num()
        out[b] = torch.einsum("hqt,thd->qhd", weights, values)
    return out


@pytest.mark.parametrize("planned", [False, True], ids=["static", "planned"])
def test_alibi_through_the_seam_agrees_with_its_formula(built: Emulated, planned: bool) -> None:
    inputs = normal(built.spec, len(LENGTHS), max(LENGTHS), q_len=2, seed=1)
    held = ReferenceCache(built.spec, len(LENGTHS), built.layout.tokens)
    held.prefill(inputs.k, inputs.v, torch.tensor(LENGTHS, dtype=torch.int32))
    step = Step(built, held, inputs.q, processors=5, planned=planned)
    step.run()
    want = alibi(held, inputs.q)
    assert relative_l2(step.out, want) <= tolerance(step.q.dtype)
    assert relative_l2(step.out, held.attend(inputs.q)[0]) > 0.1, "the slopes must matter"
