"""The models that accuracy is taken with, and how they are trained. Without torch: commands name them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    layers: int
    width: int
    q_heads: int
    kv_heads: int
    hidden: int
    """Width of the feed-forward network."""
    vocabulary: int
    head_dim: int = 128
    """That of most models, so that the groups of a format are those that it is used with."""
    rope_base: float = 10000.0


@dataclass(frozen=True)
class Stage:
    """Steps of training on `batch` sequences of `tokens` tokens."""

    steps: int
    batch: int
    tokens: int


@dataclass(frozen=True)
class Recipe:
    """A model and how it is trained. The last stage has the longest sequences, over which RoPE must hold."""

    name: str
    shape: Shape
    pieces: int
    """Pieces of text with numbers of their own."""
    stages: tuple[Stage, ...]
    lengths: tuple[int, ...]
    """Lengths at which the model is evaluated, in tokens."""
    rate: float = 3e-3
    seed: int = 0


SMALL = Recipe("small", Shape(3, 192, 4, 2, 512, 1280), 1024, (Stage(1000, 4, 256), Stage(80, 1, 2048)), (512, 1024, 2048))
LARGE = Recipe("large", Shape(6, 512, 8, 2, 1408, 4352), 4096, (Stage(900, 16, 2048), Stage(150, 4, 8192)), (1024, 2048, 8192), rate=1e-3)
RECIPES = {recipe.name: recipe for recipe in (SMALL, LARGE)}
