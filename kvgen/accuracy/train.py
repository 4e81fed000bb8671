"""Trains the small transformer on the sources of Python's library, seeded, and records its loss curve.

Weights are kept in kvgen's cache and made again where they are missing: minutes on one GPU, and for the small size on two cores.
"""

from __future__ import annotations

import csv
import io
import math
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from kvgen._resources import user_cache
from kvgen.accuracy.model import Transformer, causal
from kvgen.accuracy.recipe import Recipe, Stage
from kvgen.accuracy.text import Corpus, corpus, sources
from kvgen.digest import digest
from kvgen.errors import host_errors
from kvgen.files import open_plain, write_whole

Told = Callable[[str], None]


@dataclass(frozen=True)
class Point:
    """A point of the loss curve: mean loss of the steps since the last one, in nats per token, and of held-out text."""

    step: int
    tokens: int
    loss: float
    held_out: float


def text_of(recipe: Recipe) -> Corpus:
    """The corpus of a recipe. Raises KvgenError where this installation has no sources."""
    return corpus(sources(), recipe.pieces)


def train(recipe: Recipe, text: Corpus, device: torch.device, told: Told = print) -> tuple[Transformer, list[Point]]:
    """A model of the recipe, and its loss curve. The same seed, device and version of torch give the same weights."""
    with deterministic(recipe.seed):
        model = Transformer(recipe.shape).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.1)
        random = torch.Generator().manual_seed(recipe.seed)
        total = sum(stage.steps for stage in recipe.stages)
        curve: list[Point] = []
        losses: list[torch.Tensor] = []
        step = seen = 0
        for stage in recipe.stages:
            for _ in range(stage.steps):
                for group in optimizer.param_groups:
                    group["lr"] = recipe.rate * _schedule(step, total)
                losses.append(_step(model, optimizer, windows(text.train, stage, random).to(device)))
                step, seen = step + 1, seen + stage.batch * stage.tokens
                if not step % max(1, total // 20) or step == total:
                    held_out = held_out_loss(model, text.held_out, stage.tokens, device)
                    curve.append(Point(step, seen, float(torch.stack(losses).mean()), held_out))
                    told(f"step {step} of {total}: loss {curve[-1].loss:.3f}, of held-out text {held_out:.3f}")
                    losses.clear()
    return model.eval(), curve


@contextmanager
def deterministic(seed: int) -> Iterator[None]:
    """Seeds, and the algorithms that give the same bits again; the former ones afterwards."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    settings: Any = torch.utils.deterministic
    before, filled = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True)
        settings.fill_uninitialized_memory = False  # filling takes as long as the step itself
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)
            settings.fill_uninitialized_memory = filled


def _schedule(step: int, total: int) -> float:
    """Factor of the learning rate: up over the first 5 %, then down along a cosine to a tenth."""
    warm = max(1, total // 20)
    return (step + 1) / warm if step < warm else 0.55 + 0.45 * math.cos(math.pi * (step - warm) / (total - warm))


def windows(tokens: torch.Tensor, stage: Stage, random: torch.Generator) -> torch.Tensor:
    """Sequences at random places: int64 [batch, tokens + 1]."""
    starts = torch.randint(len(tokens) - stage.tokens, (stage.batch,), generator=random)
    return torch.stack([tokens[start : start + stage.tokens + 1] for start in starts.tolist()])


def _step(model: Transformer, optimizer: torch.optim.Optimizer, window: torch.Tensor) -> torch.Tensor:
    loss = _loss(model, window)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def _loss(model: Transformer, window: torch.Tensor) -> torch.Tensor:
    with torch.autocast(window.device.type, torch.bfloat16):
        logits = model(window[:, :-1], causal)
    return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: Transformer, tokens: torch.Tensor, length: int, device: torch.device, most: int = 8192) -> float:
    """Mean loss in nats per token over the first sequences of `length` tokens, about `most` in all."""
    count = max(1, min(most, len(tokens) - 1) // length)
    window = torch.stack([tokens[start : start + length + 1] for start in range(0, count * length, length)])
    return float(torch.stack([_loss(model, row.unsqueeze(0).to(device)) for row in window]).mean())


def model_of(
    recipe: Recipe, text: Corpus, device: torch.device, told: Told = print, *, again: bool = False
) -> tuple[Transformer, list[Point]]:
    """The trained model of a recipe and its loss curve, from kvgen's cache or else trained now (with `again` in any case)."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    key = digest([asdict(recipe), text.digest, torch.__version__, name])
    file = user_cache() / "models" / f"{recipe.name}-{key}.pt"
    if not again and file.exists():
        with suppress(
            OSError, ValueError, RuntimeError, KeyError, TypeError, EOFError, pickle.UnpicklingError
        ):  # damaged, or cut off: trained again
            with open_plain(file) as opened:
                kept = torch.load(opened, map_location=device, weights_only=True)
            model = Transformer(recipe.shape).to(device)
            model.load_state_dict(kept["weights"])
            return model.eval(), [Point(**point) for point in kept["curve"]]
    told(f"training the {recipe.name} model on {len(text.train)} tokens of Python's library (once; its weights are cached)")
    model, curve = train(recipe, text, device, told)
    with host_errors("write", file):
        file.parent.mkdir(parents=True, exist_ok=True)
        staged = file.with_name(f".{file.name}.{os.getpid()}")
        torch.save({"weights": model.state_dict(), "curve": [asdict(point) for point in curve]}, staged)
        staged.replace(file)
    return model, curve


def write_curve(file: Path, curve: Sequence[Point], facts: Mapping[str, Any]) -> None:
    """A loss curve as CSV, each point with the facts of the run. Raises HostError where the file cannot be written."""
    told = [{**asdict(point), "loss": f"{point.loss:.5f}", "held_out": f"{point.held_out:.5f}", **facts} for point in curve]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(told[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(told)
    with host_errors("write", file):
        write_whole(file, text.getvalue())
