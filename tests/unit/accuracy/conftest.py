"""A tiny model, trained in seconds, and a kernel for its heads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvgen.accuracy.model import Transformer
from kvgen.accuracy.recipe import Recipe, Shape, Stage
from kvgen.accuracy.text import Corpus, corpus
from kvgen.accuracy.train import Point, train

TINY = Recipe("tiny", Shape(2, 32, 4, 2, 64, 256 + 64, head_dim=64), 64, (Stage(35, 4, 64), Stage(5, 1, 256)), (128, 320))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def text() -> Corpus:
    lines = [f"def f{i % 7}(x{i % 11}):\n    return x{i % 11} + {i % 13}\n" for i in range(2000)]
    return corpus(["".join(lines[start : start + 50]) for start in range(0, 2000, 50)], TINY.pieces)


@pytest.fixture(scope="session")
def trained(text: Corpus) -> tuple[Transformer, list[Point]]:
    return train(TINY, text, torch.device("cpu"), lambda message: None)


@pytest.fixture(scope="session")
def model(trained: tuple[Transformer, list[Point]]) -> Transformer:
    return trained[0]
