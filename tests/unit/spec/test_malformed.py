"""Two thousand and more specs with something wrong: a SpecError each, never anything else."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvgen.errors import SpecError
from kvgen.spec import KernelSpec, dump_spec, load_spec, presets

CASES = 2400
EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))

Path_ = tuple[Any, ...]

WRONG_VALUES: list[Any] = [
    None, "", "x", "4", "null", -1, 0, 3, 5, 17, 4.5, -0.0, 1e400, float("nan"), float("-inf"), True, 10**30, -(10**400),
    [], [[]], {}, {"a": {}}, [1, 2], "\u0000", "é" * 300, {"bits": 4}, ["float16"], b"bytes",
]  # fmt: skip


def leaves(data: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Paths of everything inside."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield (*path, key)
            yield from leaves(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield (*path, index)
            yield from leaves(value, (*path, index))


def holder(data: Any, path: Path_) -> Any:
    for part in path[:-1]:
        data = data[part]
    return data


def change_value(data: Any, rng: random.Random) -> None:
    path = rng.choice(list(leaves(data)))
    holder(data, path)[path[-1]] = copy.deepcopy(rng.choice(WRONG_VALUES))


def drop_field(data: Any, rng: random.Random) -> None:
    path = rng.choice([(s,) for s in ("attention", "key", "value")] + [("attention", f) for f in ("q_heads", "kv_heads", "head_dim")])
    del holder(data, path)[path[-1]]


def misspell(data: Any, rng: random.Random) -> None:
    path = rng.choice([p for p in leaves(data) if isinstance(p[-1], str)])
    owner, name = holder(data, path), path[-1]
    at = rng.randrange(len(name))
    wrong = rng.choice([name[:at] + name[at + 1 :], name[:at] + "z" + name[at:], name.upper(), name + " ", 7, "<<", ""])
    owner[wrong] = owner.pop(name)


def move_section(data: Any, rng: random.Random) -> None:
    source, target = rng.sample(["attention", "key", "value", "cache", "workloads"], 2)
    data[target] = data.get(source, {"nothing": None})


def break_a_rule(data: Any, rng: random.Random) -> None:
    section, change = rng.choice(
        [
            ("attention", {"q_heads": 33, "kv_heads": 2}),
            ("key", {"bits": 4, "axis": "channel", "group": 24, "boost": {}}),
            ("key", {"bits": 4, "boost": {"fraction": 0.25}}),
            ("value", {"bits": 4, "axis": "token", "group": 56}),
            ("cache", {"layout": "paged", "page": None, "sink": 0, "local": 0}),
            ("cache", {"layout": "paged", "page": 24, "sink": 0, "local": 0}),
            ("cache", {"layout": "contiguous", "page": 64, "sink": 0, "local": 0}),
        ]
    )
    data[section].update(change)
    if rng.random() < 0.3:
        data["workloads"].append({"batch": 1, "kv_len": 4096, "q_len": 9999})


PIECES = [
    "{", "}", "[", "]", ":", ": ", "\n", "\t", "&a ", "*a", "!!", "!!python/name:os ", "|", ">", "'", '"', "%", "@", "\x00", "\x85",
    "\ud800", "- ", "? ", "#", "---\n", "...", "<<: ", "0x", "1_0", "\\", "2024-13-45", "1:99",
]  # fmt: skip
CHANGES: list[Callable[[Any, random.Random], None]] = [change_value, change_value, drop_field, misspell, move_section, break_a_rule]


def garbled(text: str, rng: random.Random) -> str:
    """Text with characters cut, doubled, swapped or replaced by what means something in YAML."""
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(text) + 1)
        piece = rng.choice(PIECES)
        cut = rng.choice([0, 0, 1, rng.randrange(30)])
        text = text[:at] + piece + text[at + cut :]
    return text


def valid() -> list[dict[str, Any]]:
    """Every example and preset as plain data with all fields."""
    specs = [*(load_spec(file) for file in EXAMPLES), *presets().values()]
    return [yaml.safe_load(dump_spec(spec)) for spec in specs]


def outcome(source: Any) -> SpecError | KernelSpec:
    """A spec or a SpecError; anything else that is raised fails the test."""
    try:
        return load_spec(source)
    except SpecError as error:
        return error


def test_random_malformed_data_gives_spec_errors() -> None:
    rng = random.Random(20)
    starts = valid()
    refused = 0
    while refused < CASES:
        data = copy.deepcopy(rng.choice(starts))
        try:
            for _ in range(rng.randint(1, 3)):
                rng.choice(CHANGES)(data, rng)
        except (KeyError, TypeError, AttributeError, IndexError):
            continue  # a second change that the first one left no place for
        result = outcome(yaml.safe_dump(data) if refused % 8 == 0 else data)
        if isinstance(result, SpecError):
            refused += 1
            assert result.issues
            assert all(issue.message and "\n" not in str(issue) for issue in result.issues)
        else:  # a change may land on another valid spec, which must then survive a round trip
            assert load_spec(dump_spec(result)) == result


def test_random_malformed_text_gives_spec_errors() -> None:
    rng = random.Random(21)
    texts = [file.read_text() for file in EXAMPLES]
    refused = 0
    for _ in range(600):
        result = outcome("\n" + garbled(rng.choice(texts), rng))
        refused += isinstance(result, SpecError)
    assert refused > 500


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_give_spec_errors(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    file = tmp_path / "noise.yaml"
    for size in (1, 10, 100, 1000, 10_000):
        file.write_bytes(rng.randbytes(size))
        assert isinstance(outcome(file), SpecError)
