"""The example of docs/kernels.md, ALiBi as a score modifier: the page's own text, emulated, against the formula in fp64."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_words import spec_of, workload_of
from kvgen.lower.backend import Source
from kvgen.verify.cache import ReferenceCache
from kvgen.verify.data import normal
from kvgen.verify.tolerance import relative_l2, tolerance
from tests.unit.lower_cuda import emulate_attend
from tests.unit.lower_cuda.emulate_attend import Emulated, Step, launch
from tests.unit.lower_cuda.page_example import WORDS, alibi, with_alibi

LENGTHS = (700, 0, 127, 300)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    """A kernel of 8 query heads with the page's header, and the page's two lines of change."""
    spec, folder = spec_of(WORDS, "sm90", [workload_of("2x256")]), tmp_path_factory.mktemp("alibi")
    rendered = emulate_attend.source

    def changed(*arguments: object) -> Source:
        return with_alibi(rendered(*arguments), folder)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulate_attend, "source", changed)
        return Emulated(spec, 64, launch(), folder)


@pytest.mark.parametrize("planned", [False, True], ids=["static", "planned"])
def test_alibi_through_the_seam_agrees_with_its_formula(built: Emulated, planned: bool) -> None:
    inputs = normal(built.spec, len(LENGTHS), max(LENGTHS), q_len=2, seed=1)
    held = ReferenceCache(built.spec, len(LENGTHS), built.layout.tokens)
    held.prefill(inputs.k, inputs.v, torch.tensor(LENGTHS, dtype=torch.int32))
    step = Step(built, held, inputs.q, processors=5, planned=planned)
    step.run()
    k, v = (x.transpose(1, 2) for x in held.keys_values())
    want = torch.stack([alibi(inputs.q[b], k[b, :, :length], v[b, :, :length]) for b, length in enumerate(LENGTHS)])
    assert relative_l2(step.out, want) <= tolerance(step.q.dtype)
    assert relative_l2(step.out, held.attend(inputs.q)[0]) > 0.1, "the slopes must matter"
