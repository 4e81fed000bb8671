"""Short words for specs, schedules and workloads, for sweeps on a command line.

spec      k4v4  ke4m3v4  k8v4:token  k2v2:kg64:vg32  k4v4:h64/8:bf16:q4:page64:sym  k4v4:cap50:window1024  k2v2:boost1/8  k2v2:boost1/4range
          k4v4:krot64:vrot16u
schedule  w8u4d1  w8u4d1.cl8  w4u4d1c2  n256.w8u4d1.noexact  default  space  space20
workload  8x32768  1x131072q4
"""

from __future__ import annotations

import random
import re

from kvgen.arch import Target
from kvgen.lower.backend import Backend
from kvgen.lower.schedule import Params, Schedule, Value
from kvgen.spec import AnySpec, KernelSpec, Workload, load_spec
from kvgen.spec.rules import IMPLIED

_WORDS: dict[str, tuple[str, Value]] = {
    "async": ("copy", "cp_async"),
    "bulk": ("copy", "bulk_stage"),
    "tile": ("copy", "bulk_tile"),
    "last": ("reduction", "last_cta"),
    **{f"cl{n}": ("reduction", f"cluster{n}") for n in (2, 4, 8)},
    "exact": ("exact_q", True),
    "noexact": ("exact_q", False),
}
_LETTERS = {"w": "warps", "u": "kv_tile", "d": "tiles_in_flight", "s": "stages", "c": "ctas_per_sm"}
_STEP = {"kv_tile": 32}
"""What the number behind a letter counts: u4 is a KV tile of 4 x 32 tokens."""


def spec_of(words: str, arch: Target, workloads: list[Workload]) -> KernelSpec:
    """The spec that words mean. Raises ValueError for an unknown word."""
    bits, *rest = words.split(":")
    found = re.fullmatch(r"k(\d+|e\dm\d|mxfp4|nvfp4)v(\d+|e\dm\d|mxfp4|nvfp4)", bits)
    if found is None:
        raise ValueError(f"a spec starts with its bits, like k4v4, not {bits!r}")
    attention: dict[str, object] = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "float16"}
    key: dict[str, object] = {"axis": "channel", "group": 128, **_code(found[1])}
    value: dict[str, object] = {"axis": "token", "group": 128, **_code(found[2])}
    cache: dict[str, object] = {}
    parts = {"attention": attention, "key": key, "value": value, "cache": cache}
    for word in rest:
        for part, changes in _spec_word(word).items():
            parts[part].update(changes)
    dim = int(str(attention["head_dim"]))
    for given, part in (("kg", key), ("vg", value)):
        if part["axis"] == "token" and given not in words and "group" not in IMPLIED.get(str(part.get("type")), {}):
            part["group"] = dim
    name = re.sub(r"[^A-Za-z0-9._-]", "-", words)
    return load_spec(
        {"name": name, "arch": arch, "attention": attention, "key": key, "value": value, "cache": cache, "workloads": workloads}
    )


def _code(word: str) -> dict[str, object]:
    """How codes are stored: integers of so many bits, or a type of floats."""
    return {"bits": int(word), "zero": True} if word.isdigit() else {"type": word, **IMPLIED[word]}


def _spec_word(word: str) -> dict[str, dict[str, object]]:
    """What one word changes, by section."""
    plain: dict[str, dict[str, dict[str, object]]] = {
        "token": {"key": {"axis": "token"}},
        "sym": {"key": {"zero": False}, "value": {"zero": False}},
        "vchannel": {"value": {"axis": "channel"}},
        "bf16": {"attention": {"dtype": "bfloat16"}},
        "sinks": {"attention": {"sinks": True}},
        "arrival": {"cache": {"quantize": "arrival"}},
    }
    if word in plain:
        return plain[word]
    if heads := re.fullmatch(r"h(\d+)/(\d+)", word):
        return {"attention": {"q_heads": int(heads[1]), "kv_heads": int(heads[2])}}
    if boost := re.fullmatch(r"boost(\d+)/(\d+)(range|static)?", word):
        fraction = int(boost[1]) / int(boost[2])
        return {"key": {"boost": {"fraction": fraction, "select": boost[3] or "mean_abs"}}}
    if rotation := re.fullmatch(r"([kv])rot(\d+)(u?)(c?)", word):  # u: without signs, c: by the caller
        rotate = {"block": int(rotation[2]), "signs": not rotation[3], "applied": "caller" if rotation[4] else "kernel"}
        return {"key" if rotation[1] == "k" else "value": {"rotate": rotate}}
    if static := re.fullmatch(r"([kv])scale-(tensor|head|channel)", word):
        return {"key" if static[1] == "k" else "value": {"scale": static[2], "zero": False}}
    number = re.fullmatch(r"(kg|vg|d|q|page|sink|local|rollback|cap|window)(\d+)", word)
    if number is None:
        raise ValueError(f"{word!r} is no word of a spec")
    n = int(number[2])
    numbers: dict[str, dict[str, dict[str, object]]] = {
        "kg": {"key": {"group": n}},
        "vg": {"value": {"group": n}},
        "d": {"attention": {"head_dim": n}},
        "q": {"attention": {"q_len": n}},
        "page": {"cache": {"layout": "paged", "page": n}},
        **{name: {"cache": {name: n}} for name in ("sink", "local", "rollback")},
        "cap": {"attention": {"softcap": float(n)}},
        "window": {"attention": {"window": n}},
    }
    return numbers[number[1]]


def workload_of(word: str) -> Workload:
    """`8x32768`, `8x32768q4`, or sequences of several lengths: `1x131072+63x1024` is a batch of 64."""
    word, _, q_len = word.partition("q")
    lengths = lengths_of(word)
    return Workload(batch=len(lengths), kv_len=max(lengths), q_len=int(q_len or 1))


def lengths_of(word: str) -> list[int]:
    """`kv_len` of every sequence of a workload."""
    lengths: list[int] = []
    for part in word.partition("q")[0].split("+"):
        found = re.fullmatch(r"(\d+)x(\d+)", part)
        if found is None:
            raise ValueError(f"{word!r} is no workload like 8x32768")
        lengths += [int(found[2])] * int(found[1])
    return lengths


def schedules_of(words: str, backend: Backend, spec: AnySpec, target: Target) -> list[Schedule]:
    """The schedules that a word means: one, or for `space[N]` all points (N of them at random). What a word leaves out is the plain
    schedule's.
    """
    if words == "default":
        return [backend.default(spec, target)]
    base = backend.defaults(spec, target)[0]
    if words.startswith("space"):
        points = list(backend.space(spec, target).schedules())
        return random.Random(0).sample(points, min(int(words[5:] or len(points)), len(points)))
    layout, launch = dict(base.layout), dict(base.launch)
    for word in words.split("."):
        if word in _WORDS:
            launch.update([_WORDS[word]])
        elif block := re.fullmatch(r"n(\d+)", word):
            layout["block"] = int(block[1])
        elif re.fullmatch(r"([wudsc]\d+)+", word):
            numbers = {_LETTERS[letter]: int(number) for letter, number in re.findall(r"([wudsc])(\d+)", word)}
            launch |= {name: number * _STEP.get(name, 1) for name, number in numbers.items()}
        else:
            raise ValueError(f"{word!r} is no word of a schedule")
    return [Schedule(base.backend, Params(layout), Params(launch))]


def schedule_word(schedule: Schedule) -> str:
    """The short word of a schedule; the defaults of its choices are left out."""
    launch = schedule.launch
    numbers = {letter: launch.integer(name) // _STEP.get(name, 1) for letter, name in _LETTERS.items() if name in launch}
    chosen = {name: value for name, value in launch.items() if name not in _LETTERS.values()}
    plain = {"copy": "cp_async", "splits": "automatic", "reduction": "last_cta", "form": "mma", "exact_q": True}
    words = {item: word for word, item in _WORDS.items()}
    parts = [words[name, chosen[name]] for name, usual in plain.items() if chosen.get(name, usual) != usual]
    return ".".join([f"n{schedule.layout['block']}", "".join(f"{letter}{number}" for letter, number in numbers.items()), *parts])
