"""The small transformer, its training, and outlier channels that leave its function unchanged."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from kvgen.accuracy.evaluate import prompt
from kvgen.accuracy.model import Transformer, causal, rotated, rotations
from kvgen.accuracy.outliers import RATIO, factor_for, outliers, ranges, with_outliers
from kvgen.accuracy.text import Corpus
from kvgen.accuracy.train import Point, model_of, train, write_curve
from tests.unit.accuracy.conftest import TINY

CPU = torch.device("cpu")


def test_rotations_depend_on_distance_alone() -> None:
    random = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 64, generator=random)
    scores = []
    for at in (3, 40):
        here, there = (rotations(TINY.shape, torch.tensor([position])) for position in (at + 5, at))
        scores.append(float((rotated(q, here) * rotated(k, there)).sum()))
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)


def test_a_later_token_does_not_change_earlier_predictions(model: Transformer) -> None:
    tokens = torch.arange(40).unsqueeze(0)
    other = tokens.clone()
    other[0, 30] = 200
    with torch.no_grad():
        first, second = model(tokens, causal), model(other, causal)
    torch.testing.assert_close(first[:, :30], second[:, :30])
    assert not torch.equal(first[:, 30:], second[:, 30:])


def test_training_lowers_the_loss_and_the_same_seed_gives_the_same_weights(trained: tuple[Transformer, list[Point]], text: Corpus) -> None:
    model, curve = trained
    assert curve[-1].loss < 0.9 * curve[0].loss
    assert curve[-1].held_out < curve[0].held_out
    assert [point.step for point in curve] == list(range(2, 41, 2))
    again, same = train(TINY, text, CPU, lambda message: None)
    assert same == curve
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in model.state_dict().items())
    assert not torch.are_deterministic_algorithms_enabled()


def test_weights_are_kept_and_damaged_ones_made_again(
    text: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: tuple[Transformer, list[Point]]
) -> None:
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path))
    runs: list[int] = []

    def counted(*arguments: object) -> tuple[Transformer, list[Point]]:
        runs.append(1)
        return trained

    monkeypatch.setattr("kvgen.accuracy.train.train", counted)
    first, curve = model_of(TINY, text, CPU, lambda message: None)
    second, same = model_of(TINY, text, CPU, lambda message: None)
    assert (len(runs), same) == (1, curve)
    assert all(torch.equal(weight, second.state_dict()[name]) for name, weight in first.state_dict().items())
    (file,) = (tmp_path / "models").iterdir()
    file.write_bytes(file.read_bytes()[:1000])
    model_of(TINY, text, CPU, lambda message: None)
    assert len(runs) == 2
    model_of(TINY, text, CPU, lambda message: None, again=True)
    assert len(runs) == 3


def test_the_loss_curve_is_written_with_its_facts(trained: tuple[Transformer, list[Point]], tmp_path: Path) -> None:
    write_curve(tmp_path / "curve.csv", trained[1], {"device": "here"})
    lines = (tmp_path / "curve.csv").read_text().splitlines()
    assert lines[0] == "step,tokens,loss,held_out,device"
    assert len(lines) == 1 + len(trained[1])
    assert lines[-1].startswith("40,10240,")
    assert lines[-1].endswith(",here")


def test_outlier_channels_leave_the_function_unchanged_to_the_bit(model: Transformer, text: Corpus) -> None:
    changed = copy.deepcopy(model)
    keys = [k for k, _ in prompt(model, text.held_out, 320, batch=2, scored=64).kept]
    before = outliers(keys)
    factor = factor_for(before)
    assert factor > 1
    with_outliers(changed, keys, factor)
    tokens = text.held_out[:100].unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(model(tokens, causal), changed(tokens, causal))
    given = prompt(changed, text.held_out, 320, batch=2, scored=64)
    after = outliers([k for k, _ in given.kept], factor)
    assert RATIO / 1.5 < after.largest < RATIO * 1.5
    grown = ranges(given.kept[0][0]) / ranges(keys[0])
    assert sorted(grown.flatten().unique().tolist()) == [1.0, factor]
    assert torch.equal(grown[:, :32], grown[:, 32:])  # channels that rotate together


def test_a_model_that_has_outlier_channels_stays_as_it_is(model: Transformer) -> None:
    wide = torch.randn(1, 50, 2, 64)
    wide[..., 5] *= 20
    assert factor_for(outliers([wide])) == 1


def test_a_factor_that_would_round_is_refused(model: Transformer) -> None:
    with pytest.raises(ValueError, match="power of two"):
        with_outliers(model, [], 3.0)
