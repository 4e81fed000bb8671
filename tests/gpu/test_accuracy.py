"""The table of what formats cost, over kernels of a GPU."""

from __future__ import annotations

import pytest
import torch

from kvgen.accuracy.evaluate import predictions, prompt, score
from kvgen.accuracy.model import Transformer, causal
from kvgen.accuracy.outputs import HEAD_LIMIT, outputs
from kvgen.accuracy.recipe import Recipe, Shape, Stage
from kvgen.accuracy.run import kernels_of
from kvgen.accuracy.suite import for_model, suite, unquantized
from kvgen.accuracy.text import corpus
from kvgen.accuracy.train import train
from kvgen.spec.target import resolve
from kvgen.verify.tolerance import tolerance
from tests.support.planted import Planted

TINY = Recipe("tiny", Shape(2, 64, 4, 2, 128, 256 + 64), 64, (Stage(60, 4, 128), Stage(10, 1, 512)), (512,))


def test_formats_cost_what_they_do_and_a_planted_error_is_seen() -> None:
    device = torch.device("cuda")
    lines = [f"def f{i % 7}(x{i % 11}):\n    return x{i % 11} + {i % 13}\n" for i in range(4000)]
    text = corpus(["".join(lines[start : start + 50]) for start in range(0, 4000, 50)], TINY.pieces)
    model: Transformer = train(TINY, text, device, lambda message: None)[0]
    again = train(TINY, text, device, lambda message: None)[0]
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in model.state_dict().items())
    given = prompt(model, text.held_out, 512, batch=2, scored=64)
    spec = for_model(suite()["int8-per-channel"], TINY.shape, resolve("native"))
    kernel, wide = kernels_of([spec, unquantized(spec)])
    right = predictions(model, wide, given)
    with torch.no_grad():
        logits = model(given.tokens[:, :-1], causal)[:, -64:]
    torch.testing.assert_close(right.log_probabilities, logits.double().log_softmax(-1), rtol=0, atol=2e-2)
    sound, planted = (score(512, predictions(model, one, given), right) for one in (kernel, Planted(kernel)))
    assert sound == score(512, predictions(model, kernel, given), right)
    assert planted.divergence > 4 * sound.divergence
    limit = HEAD_LIMIT * tolerance("float16")
    assert outputs(kernel, 1024).kernel_error < limit
    assert outputs(Planted(kernel), 1024).kernel_error > 2 * limit


@pytest.mark.parametrize("name", ["kitty", "k4v2"])
def test_kernels_of_the_suite_are_as_exact_as_the_reference(name: str) -> None:
    (kernel,) = kernels_of([for_model(suite()[name], TINY.shape, resolve("native"))])
    assert outputs(kernel, 1024).kernel_error < HEAD_LIMIT * tolerance("float16")
