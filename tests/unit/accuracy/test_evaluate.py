"""Perplexity and errors of outputs through real CPU kernels, and a planted error that both see."""

from __future__ import annotations

import pytest
import torch

from kvgen.accuracy.evaluate import Predictions, Prompt, predictions, prompt, score
from kvgen.accuracy.model import Transformer, causal
from kvgen.accuracy.outputs import HEAD_LIMIT, outputs
from kvgen.accuracy.run import kernels_of
from kvgen.accuracy.suite import unquantized
from kvgen.accuracy.text import Corpus
from kvgen.api import Kernel
from kvgen.errors import KvgenError
from kvgen.spec import KernelSpec, load_spec
from tests.support.planted import Planted
from tests.support.specs import base

SCORED = 64


@pytest.fixture(scope="module")
def spec() -> KernelSpec:
    return load_spec(base(key={"bits": 8, "axis": "channel", "group": 32}, value={"bits": 8, "axis": "token", "group": 64}))


@pytest.fixture(scope="module")
def kernel(spec: KernelSpec) -> Kernel:
    (made,) = kernels_of([spec])
    made.set_threads(1)
    return made


@pytest.fixture(scope="module")
def given(model: Transformer, text: Corpus) -> Prompt:
    return prompt(model, text.held_out, 320, batch=2, scored=SCORED)


@pytest.fixture(scope="module")
def right(model: Transformer, spec: KernelSpec, given: Prompt) -> Predictions:
    return predictions(model, *kernels_of([unquantized(spec)]), given)


def test_an_unquantized_cache_predicts_as_the_model_does(model: Transformer, given: Prompt, right: Predictions) -> None:
    with torch.no_grad():
        logits = model(given.tokens[:, :-1], causal)[:, -SCORED:]
    torch.testing.assert_close(right.log_probabilities, logits.double().log_softmax(-1), rtol=0, atol=5e-3)


def test_an_unquantized_cache_costs_nothing(right: Predictions) -> None:
    found = score(320, right, right)
    assert (found.increase, found.agreement, found.divergence) == (0, 1, 0)
    assert found.perplexity == found.unquantized > 1


def test_a_planted_error_in_the_scales_of_one_head_is_seen(model: Transformer, kernel: Kernel, given: Prompt, right: Predictions) -> None:
    sound = score(320, predictions(model, kernel, given), right)
    again = score(320, predictions(model, kernel, given), right)
    planted = score(320, predictions(model, Planted(kernel), given), right)
    assert sound == again
    assert sound.divergence > 0
    assert planted.divergence > 4 * sound.divergence


def test_the_kernels_own_error_tells_a_planted_error_from_the_formats(kernel: Kernel) -> None:
    sound, planted = outputs(kernel, 256), outputs(Planted(kernel), 256)
    assert sound.kernel_error < 2e-3
    assert planted.kernel_error > 2 * HEAD_LIMIT * 2e-3
    assert 0 < sound.normal.relative_l2 < planted.normal.relative_l2
    assert sound.normal.cosine > planted.normal.cosine
    assert sound == outputs(kernel, 256)


def test_a_text_or_a_length_that_is_too_short_is_refused(model: Transformer, text: Corpus) -> None:
    with pytest.raises(KvgenError, match="a length of 64 is too short"):
        prompt(model, text.held_out, 64, scored=64)
    with pytest.raises(KvgenError, match="more text than the 100 tokens"):
        prompt(model, text.held_out[:100], 128, scored=64)
