"""The whole table: every format through its kernel, over the small transformer and over seeded data."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import torch

from kvgen._machine import cores
from kvgen.accuracy.evaluate import Predictions, Prompt, predictions, prompt, require_text, score
from kvgen.accuracy.outliers import Outliers, factor_for, outliers, with_outliers
from kvgen.accuracy.outputs import HEAD_LIMIT, outputs
from kvgen.accuracy.recipe import Recipe
from kvgen.accuracy.row import Row
from kvgen.accuracy.suite import for_model, unquantized
from kvgen.accuracy.train import Point, Told, model_of, text_of
from kvgen.arch import Target
from kvgen.format.sizes import bits_per_element
from kvgen.spec import KernelSpec
from kvgen.verify.tolerance import tolerance

if TYPE_CHECKING:
    from kvgen.accuracy.model import Transformer
    from kvgen.api import Kernel

KV_LEN = 4096
"""Tokens of the seeded data."""


@dataclass(frozen=True)
class Table:
    """The rows of a run, the loss curve of its model, and its facts."""

    rows: tuple[Row, ...]
    curve: tuple[Point, ...]
    facts: Mapping[str, Any]

    def wrong(self, specs: Mapping[str, KernelSpec]) -> dict[str, float]:
        """By format, the error of a kernel that is further from the reference over the same cache than it may be, in one head or more."""
        limits = {name: HEAD_LIMIT * tolerance(spec.attention.dtype) for name, spec in specs.items()}
        return {row.name: row.kernel_error for row in self.rows if row.kernel_error > limits[row.name]}


@dataclass
class Bench:
    """The model with outlier channels, its prompts, and predictions over unquantized caches by dtype and length."""

    model: Transformer
    prompts: tuple[Prompt, ...]
    trained: Outliers
    """Of the model as it was trained."""
    given: Outliers
    """Of the one that is evaluated."""
    wide: Mapping[str, Kernel]
    """Kernels over 16 bits by dtype."""
    right: dict[tuple[str, int], Predictions] = field(default_factory=dict)

    def unquantized(self, spec: KernelSpec, given: Prompt) -> Predictions:
        """Predictions over a cache of 16 bits."""
        key = spec.attention.dtype, given.length
        if key not in self.right:
            self.right[key] = predictions(self.model, self.wide[spec.attention.dtype], given)
        return self.right[key]


def table(
    specs: Mapping[str, KernelSpec],
    target: Target,
    recipe: Recipe,
    *,
    lengths: Sequence[int] | None = None,
    times: Mapping[str, float] | None = None,
    seed: int = 0,
    again: bool = False,
    told: Told = print,
    kept: Callable[[Table], None] = lambda _: None,
) -> Table:
    """Rows of formats by name, at each length. `times` are µs of a step by name. `kept` is given the table so far after every format.

    `seed` is that of the data; the model's is its recipe's. `again` trains the model even if its weights are cached.
    Raises KvgenError where a format does not fit the model's heads or this installation has no text, and as `get_kernel` does.
    """
    device = torch.device("cpu" if target == "cpu" else "cuda")
    formats = {name: for_model(spec, recipe.shape, target) for name, spec in specs.items()}
    text = text_of(recipe)
    for length in lengths or recipe.lengths:
        require_text(text.held_out, length)
    wide: dict[str, KernelSpec] = {spec.attention.dtype: unquantized(spec) for spec in formats.values()}
    kernels = kernels_of([*formats.values(), *wide.values()])
    over_wide = dict(zip(wide, kernels[len(formats) :], strict=True))
    model, curve = model_of(recipe, text, device, told, again=again)
    bench = prepared(model, text.held_out, lengths or recipe.lengths, over_wide)
    found = Table((), tuple(curve), {**facts(target), **_model_facts(recipe, text.digest, bench)})
    with one_thread(kernels):
        for (name, spec), kernel in zip(formats.items(), kernels, strict=False):
            errors = outputs(kernel, KV_LEN, seed)
            rows = list(found.rows)
            for given in bench.prompts:
                scored = score(given.length, predictions(bench.model, kernel, given), bench.unquantized(spec, given))
                rows.append(Row.of(name, bits_per_element(specs[name]), errors, scored, (times or {}).get(name)))
            last = rows[-1]
            told(f"{name}: perplexity {last.perplexity:.4f} at {last.length} tokens, {last.increase:+.3%}")
            found = replace(found, rows=tuple(rows))
            kept(found)
    return found


def prepared(model: Transformer, text: torch.Tensor, lengths: Sequence[int], wide: Mapping[str, Kernel]) -> Bench:
    """The model with outlier channels, and prompts of these lengths; `wide` are kernels over 16 bits. The model given stays as it is."""
    keys = [k for k, _ in prompt(model, text, max(lengths)).kept]
    trained = outliers(keys)
    factor = factor_for(trained)
    model = copy.deepcopy(model)
    with_outliers(model, keys, factor)
    prompts = tuple(prompt(model, text, length) for length in sorted(lengths))
    given = outliers([k for k, _ in prompts[-1].kept], factor)
    return Bench(model, prompts, trained, given, wide)


def kernels_of(specs: Iterable[KernelSpec]) -> list[Kernel]:
    """The kernels of specs, compiled in parallel. That no schedule was tuned for these heads does not matter here, and is not told."""
    from kvgen.api import get_kernel
    from kvgen.api.fetch import FallbackWarning

    with warnings.catch_warnings(), ThreadPoolExecutor(cores()) as pool:
        warnings.simplefilter("ignore", FallbackWarning)
        return list(pool.map(get_kernel, specs))


@contextmanager
def one_thread(kernels: Sequence[Kernel]) -> Iterator[None]:
    """On the CPU, a step of a small model takes longer on several threads than on one: they wait for each other hundreds of times."""
    on_cpu = [kernel for kernel in kernels if kernel.target == "cpu"]
    before = torch.get_num_threads()

    def limit(threads: int) -> None:
        torch.set_num_threads(threads)
        for kernel in on_cpu:
            kernel.set_threads(min(threads, os.cpu_count() or 1))

    if not on_cpu:
        yield
        return
    limit(1)
    try:
        yield
    finally:
        limit(before)


def facts(target: Target) -> dict[str, Any]:
    """Facts of machine and versions, which every row of a file has."""
    from kvgen import __version__
    from kvgen.registry.device import here

    device = here(target)
    return {
        "device": device.get("name"),
        "driver": device.get("driver", ""),
        "torch": torch.__version__,
        "kvgen": __version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def _model_facts(recipe: Recipe, text: str, bench: Bench) -> dict[str, Any]:
    return {
        "model": recipe.name,
        "text": text,
        "outliers_trained": f"{bench.trained.largest:.3g}",
        "outliers": f"{bench.given.largest:.3g}",
        "outlier_factor": f"{bench.given.factor:g}",
    }
