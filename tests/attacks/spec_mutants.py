"""The shipped examples with something changed: most are malformed, a few are other valid specs."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from kvgen.spec import dump_spec, load_spec

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))

WRONG_VALUES: list[Any] = [
    None, "", "x", "4", "null", -1, 0, 3, 5, 17, 4.5, -0.0, 1e400, float("nan"), float("-inf"), True, 10**30, -(10**400), 10**6000,
    [], [[]], {}, {"a": {}}, [1, 2], "\u0000", "é" * 300, {"bits": 4}, ["float16"], b"bytes", "1:30", "\ud800",
]  # fmt: skip
PIECES = [
    "{", "}", "[", "]", ":", ": ", "\n", "\t", "&a ", "*a", "!!", "!!python/name:os ", "|", ">", "'", '"', "%", "@", "\x00", "\x85",
    "\ud800", "- ", "? ", "#", "---\n", "...", "<<: ", "0x", "1_0", "\\", "2024-13-45", "1:99", "!!int ", "!!map ", "&a [*a]", "9" * 5000,
]  # fmt: skip

Path_ = tuple[Any, ...]


def leaves(data: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Paths of everything inside."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield (*path, key)
        yield from leaves(value, (*path, key))


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
    path = rng.choice([p for p in leaves(data) if isinstance(p[-1], str) and p[-1]])  # an earlier change may have left the name ""
    owner, name = holder(data, path), path[-1]
    at = rng.randrange(len(name))
    wrong = rng.choice([name[:at] + name[at + 1 :], name[:at] + "z" + name[at:], name.upper(), name + " ", 7, "<<", ""])
    owner[wrong] = owner.pop(name)


def move_section(data: Any, rng: random.Random) -> None:
    source, target = rng.sample(["attention", "key", "value", "cache", "workloads"], 2)
    data[target] = data.get(source, {"nothing": None})


def tie_a_knot(data: Any, rng: random.Random) -> None:
    paths = [path for path in leaves(data) if len(path) > 1]
    path = rng.choice(paths)
    holder(data, path)[path[-1]] = data if rng.random() < 0.5 else holder(data, path)


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


CHANGES: list[Callable[[Any, random.Random], None]] = [
    change_value, change_value, drop_field, misspell, move_section, break_a_rule, tie_a_knot,
]  # fmt: skip


def changed(data: Any, rng: random.Random) -> Any:
    """A copy of a spec's data with one to three changes; None where a second change finds no place after the first."""
    data = copy.deepcopy(data)
    try:
        for _ in range(rng.randint(1, 3)):
            rng.choice(CHANGES)(data, rng)
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return None
    return data


def garbled(text: str, rng: random.Random) -> str:
    """Text with characters cut, doubled, swapped or replaced by what means something in YAML."""
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(text) + 1)
        piece = rng.choice(PIECES)
        cut = rng.choice([0, 0, 1, rng.randrange(30)])
        text = text[:at] + piece + text[at + cut :]
    return "\n" + text


def written(data: Any) -> Any:
    """The data as YAML text, or the data where YAML has no text for it."""
    try:
        return "\n" + yaml.safe_dump(data)
    except (yaml.YAMLError, ValueError, RecursionError):
        return data


def mutants(seed: int) -> Iterator[tuple[str, Any]]:
    """Changed examples without an end, as text and as data."""
    rng = random.Random(seed)
    texts = [(file.stem, file.read_text()) for file in EXAMPLES]
    datas = [(file.stem, yaml.safe_load(dump_spec(load_spec(file)))) for file in EXAMPLES]
    while True:
        name, text = rng.choice(texts)
        yield f"{name}, garbled", garbled(text, rng)
        for _ in range(2):
            name, data = rng.choice(datas)
            wrong = changed(data, rng)
            if wrong is not None:
                yield f"{name}, changed", written(wrong) if rng.random() < 0.2 else wrong
