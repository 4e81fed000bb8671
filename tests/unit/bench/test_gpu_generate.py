"""benchmarks/gpu_generate.py: its tiny model on the CPU, loops that fail or find no time, and both loops through torch.compile."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import generate_loops, generate_parts, gpu_generate
from benchmarks.fused_llama import fuse
from tests.support.models import model_of

pytestmark = pytest.mark.filterwarnings("ignore::kvgen.FallbackWarning")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """One thread, one layer, no bandwidth measured, results in a folder of the test's own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(gpu_generate, "TINY", {**gpu_generate.TINY, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64})
    monkeypatch.setattr(gpu_generate, "read_us", lambda target, nbytes: 100.0)
    yield
    torch.set_num_threads(threads)


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_generate.py", "--tiny", "--steps", "1", *words])
    return gpu_generate.main()


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "generate_tiny.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_loop_has_a_row_with_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run(monkeypatch, "--cases", "fitx200", "--loops", "graph16,int4,int4:equal,dynamic,static") == 0
    found = rows(tmp_path)
    assert [row["loop"] for row in found] == ["graph16", "int4", "int4:equal", "dynamic", "static"]
    for row in found:
        assert float(row["ms"]) > 0
        assert float(row["tokens_per_second"]) > 0
        assert row["batch"] == "3"


def test_a_loop_that_fails_ends_no_other_and_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise AssertionError("planted")

    monkeypatch.setattr(generate_loops, "Plain", fail)
    assert run(monkeypatch, "--cases", "1x40", "--loops", "graph16,dynamic") == 1
    assert [row["note"] for row in rows(tmp_path)] == ["not measured: planted", "eager, SDPA"]


def test_without_time_there_are_rows_that_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run(monkeypatch, "--cases", "1x40", "--loops", "graph16,dynamic", "--budget", "0") == 1
    assert {row["note"] for row in rows(tmp_path)} == {"no time left"}


def test_a_kernel_that_waits_for_another_does_not_count_twice() -> None:
    events = [(0.0, 4.0, "product"), (4.5, 10.0, "attend"), (9.0, 11.0, "advance"), (9.5, 10.5, "copy"), (12.0, 13.0, "product")]
    assert gpu_generate.exclusive_times(reversed(events)) == {
        "attend": (5.5, 1),
        "product": (5.0, 2),
        "advance": (1.0, 1),
        "copy": (0.0, 1),
    }


@pytest.mark.parametrize(
    ("part", "names"),
    [
        (
            "attention",
            ["attend_planned_kernel", "void kvgen::attend_static<kvgen::Traits<", "cudnn_generated_fort_native_sdpa_sm80_flash"],
        ),
        ("attention", ["void flash::flash_fwd_splitkv_kernel<cutlass::half_t>", "fmha_cutlassF_f16_aligned_64x128_rf_sm80"]),
        (
            "weights",
            ["nvjet_sm90_hsh_64x8", "void cublasLt::splitKreduce_kernel<32, 16>", "triton_red_fused_mm_t_view_5", "triton_tem_fused_mm_3"],
        ),
        (
            "rest",
            [
                "triton_poi_fused_mul_silu_split",
                "triton_poi_fused_cached_attention_mm_split_5",
                "kvgen::advance_kernel(kvgen::AdvanceArgs)",
            ],
        ),
    ],
)
def test_kernels_count_as_attention_products_or_the_rest(part: str, names: list[str]) -> None:
    assert [generate_parts.part_of(name) for name in names] == [part] * len(names)


def test_the_loop_over_16_bits_is_compiled_once_for_all_caches() -> None:
    """On a GPU a step is captured after three others, and a capture must not compile."""
    model = model_of("llama", num_hidden_layers=1)
    torch._dynamo.reset()
    forward = torch.compile(model.forward, fullgraph=True, dynamic=True, backend="aot_eager")
    generate_loops.Plain(model, forward, 2, 40).step()
    with torch._dynamo.config.patch(error_on_recompile=True):
        loop = generate_loops.Plain(model, forward, 3, 50)
        loop.step()
    plain = generate_loops.Plain(model, model.forward, 3, 50)
    for state, other in zip(plain.states, loop.states, strict=True):
        state.copy_(other)
    for tokens in (plain.tokens, loop.tokens):
        tokens.fill_(7)
    loop.step()
    plain.step()
    assert torch.equal(loop.tokens, plain.tokens)


def test_fused_products_give_the_same_logits_and_can_be_taken_apart() -> None:
    from transformers import DynamicCache

    model = model_of("llama", num_hidden_layers=2)
    model.set_attn_implementation("sdpa")
    tokens = torch.randint(0, model.config.vocab_size, (2, 9))

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return model(tokens, past_key_values=DynamicCache(config=model.config), use_cache=True).logits  # type: ignore[no-any-return]

    want = logits()
    fuse(model, on=True)
    torch.testing.assert_close(logits(), want)
    layer = model.model.layers[1]
    layer.mlp.up_proj.weight.data.zero_()  # a part of the joint weights
    changed = logits()
    assert not torch.equal(changed, want)
    fuse(model, on=False)
    torch.testing.assert_close(logits(), changed)
