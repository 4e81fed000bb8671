"""A score modifier that is not in the spec language plugs into every C++ back end alike: ALiBi, against its formula in fp64.

On CUDA it is the example of docs/kernels.md, the page's own text, which the emulator runs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu_words import spec_of, workload_of
from kvgen.lower.backend import Source, get_backend
from kvgen.lower.schedule import Params, Schedule, layout_of
from kvgen.runtime.calls import Variant
from kvgen.runtime.module import load
from kvgen.toolchain import build
from kvgen.verify.data import normal
from kvgen.verify.tolerance import relative_l2, tolerance
from tests.support.cpu import spec_of as cpu_spec
from tests.support.reference import ReferenceCache
from tests.unit.lower_cuda import emulate_attend
from tests.unit.lower_cuda.emulate_attend import Emulated, Step, launch
from tests.unit.lower_cuda.page_example import WORDS, alibi, with_alibi

LENGTHS = (700, 0, 127, 300)
ON_THE_CPU = """
struct Alibi {
  static constexpr bool active = true;
  static kvgen::F32 apply(kvgen::F32 x, const kvgen::ScorePlace& place) {
    const kvgen::F32 token = kvgen::lanes_from<kvgen::F32>([](int i) { return static_cast<float>(i); }) + static_cast<float>(place.token);
    return x - std::exp2(-static_cast<float>(place.q_head + 1)) * kvgen::kLog2e * (static_cast<float>(place.position) - token);
  }
};
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    """A kernel of 8 query heads with the page's header, and the page's two lines of change."""
    folder, rendered = tmp_path_factory.mktemp("alibi"), emulate_attend.source

    def changed(*arguments: object) -> Source:
        return with_alibi(rendered(*arguments), folder)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulate_attend, "source", changed)
        return Emulated(spec_of(WORDS, "sm90", [workload_of("2x256")]), 64, launch(), folder)


@pytest.mark.parametrize("planned", [False, True], ids=["static", "planned"])
def test_alibi_on_cuda_agrees_with_its_formula(built: Emulated, planned: bool) -> None:
    inputs = normal(built.spec, len(LENGTHS), max(LENGTHS), q_len=2, seed=1)
    held = ReferenceCache(built.spec, len(LENGTHS), built.layout.tokens)
    held.prefill(inputs.k, inputs.v, torch.tensor(LENGTHS, dtype=torch.int32))
    step = Step(built, held, inputs.q, processors=5, planned=planned)
    step.run()
    agree(step.out, inputs.q, *held.keys_values())
    assert relative_l2(step.out, held.attend(inputs.q)[0]) > 0.1, "the slopes must matter"


def test_alibi_on_the_cpu_agrees_with_its_formula() -> None:
    spec, backend = cpu_spec(heads="8/2", dim=64, k="4c64", v="4t64", q_len=2), get_backend("cpu")
    default = backend.default(spec, "cpu")
    schedule = Schedule("cpu", Params({**default.layout, "block": 64}), default.launch)
    source = backend.lower(spec, schedule, "cpu")
    text = source.text.replace("struct Config :", f"{ON_THE_CPU}\nstruct Config :").replace("kvgen::NoModifier", "Alibi")
    v = Variant(spec, layout_of(spec, schedule.layout), load(build(replace(source, text=text)).path))
    inputs = normal(spec, len(LENGTHS), max(LENGTHS), q_len=2, seed=1)
    cache = v.new_cache(len(LENGTHS), max(LENGTHS))
    v.prefill(cache, inputs.k, inputs.v, list(LENGTHS))
    agree(v.attend(inputs.q, cache), inputs.q, *v.unpack(cache))


def agree(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    want = torch.stack([alibi(q[b], k[b, :, :length], v[b, :, :length]) for b, length in enumerate(LENGTHS)])
    assert relative_l2(out, want) <= tolerance(q.dtype)
