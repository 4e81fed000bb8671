"""Compiled variants for lives on a GPU, drawn at random until each feature of the language occurs in several of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from kvgen.arch import Target
from kvgen.format.layout import PackedLayout
from kvgen.lower.backend import Backend, get_backend
from kvgen.lower.schedule import Params, Schedule, layout_of
from kvgen.runtime.calls import Variant
from kvgen.runtime.module import load
from kvgen.spec import KernelSpec, QuantSpec
from kvgen.toolchain import Artifact, build
from tests.lives.draw import CUDA, TILELANG, drawn_gpu_spec, drawn_schedule, drawn_tilelang_spec

LEAST = 3
"""Cases of every feature."""
SPECS, SCHEDULES = 16, 4
"""Candidates for a case as long as features lack some: specs with a schedule each, and more schedules of the best of these."""


@dataclass(frozen=True)
class LifeCase:
    """A spec, one of its schedules, and the target that it is compiled for."""

    spec: KernelSpec
    schedule: Schedule
    target: Target

    def __str__(self) -> str:
        return f"{self.spec.format()}\n{self.schedule}\nfor {self.target}"

    @property
    def layout(self) -> PackedLayout:
        """Its packed layout."""
        return layout_of(self.spec, self.schedule.layout)

    @property
    def foreign(self) -> bool:
        """Whether an SM90 GPU runs it through its PTX."""
        return self.target in ("sm80", "sm89")

    def artifact(self) -> Artifact:
        """The module, from the cache or compiled now. Raises UnsupportedError, CompileError."""
        source = get_backend(self.schedule.backend).lower(self.spec, self.schedule, self.target)
        return build(source)

    def compiled(self) -> Variant:
        """The module, loaded. Raises as `artifact` does."""
        return Variant(self.spec, self.layout, load(self.artifact().path))


# --- features ------------------------------------------------------------------------------------------------------------

Has = Callable[[LifeCase], bool]


def _schedule(backend: str, **values: object) -> Has:
    def has(case: LifeCase) -> bool:
        chosen = Params({**case.schedule.layout, **case.schedule.launch})
        return case.schedule.backend == backend and all(chosen.get(name) == value for name, value in values.items())

    return has


def _usual(quant: QuantSpec) -> bool:
    """Whether a group has a power of two tokens."""
    return quant.group.bit_count() == 1


def _quants(operand: str) -> dict[str, Has]:
    """Features of K or V."""

    def of(holds: Callable[[QuantSpec], bool]) -> Has:
        return lambda case: holds(getattr(case.spec, operand))

    def per_channel(group: int) -> Has:
        return of(lambda q: q.per_channel and q.group == group)

    name = {"key": "K", "value": "V"}[operand]
    return {
        **{f"{name} of {bits} bits": of(lambda q, bits=bits: q.bits == bits) for bits in (2, 4, 8, 16)},  # type: ignore[misc]
        f"symmetric {name}": of(lambda q: q.quantized and not q.zero),
        f"{name} per token": of(lambda q: q.quantized and q.axis == "token"),
        f"{name} per token in several groups": lambda c: (
            not (q := getattr(c.spec, operand)).per_channel and q.quantized and q.group < c.spec.attention.head_dim
        ),
        **{f"{name} per channel, groups of {group}": per_channel(group) for group in (16, 32, 64, 128, 256, 512)},
        f"{name} per channel, other groups of whole sub-tiles": of(lambda q: q.per_channel and q.group % 32 == 0 and not _usual(q)),
        f"{name} per channel, groups of odd multiples of 16": of(lambda q: q.per_channel and q.group % 32 == 16 and not _usual(q)),
    }


FEATURES: dict[str, Has] = {
    **{target: lambda c, target=target: c.target == target for target in ("sm80", "sm89", "sm90")},  # type: ignore[misc]
    "TileLang": lambda c: c.schedule.backend == "tilelang",
    **{dtype: lambda c, dtype=dtype: c.spec.attention.dtype == dtype for dtype in ("float16", "bfloat16")},  # type: ignore[misc]
    **_quants("key"),
    **_quants("value"),
    **{
        f"boost by {select}": lambda c, select=select: c.spec.key.boost.fraction > 0 and c.spec.key.boost.select == select  # type: ignore[misc]
        for select in ("mean_abs", "range", "static")
    },
    **{f"head_dim {dim}": lambda c, dim=dim: c.spec.attention.head_dim == dim for dim in (64, 80, 96, 112, 128, 160, 192, 256)},  # type: ignore[misc]
    "another head_dim": lambda c: c.spec.attention.head_dim not in (64, 80, 96, 112, 128, 160, 192, 256),
    "q_len 2 to 8": lambda c: c.spec.attention.q_len > 1,
    "up to 8 rows": lambda c: rows(c) <= 8,
    "9 to 16 rows": lambda c: 8 < rows(c) <= 16,
    "17 to 64 rows": lambda c: 16 < rows(c) <= 64,
    "65 to 128 rows": lambda c: rows(c) > 64,
    "one head per KV head": lambda c: c.spec.attention.group == 1,
    "several KV heads": lambda c: c.spec.attention.kv_heads > 1,
    "soft cap": lambda c: c.spec.attention.softcap > 0,
    "window, contiguous": lambda c: c.spec.attention.window is not None and c.spec.cache.page is None,
    "window, paged": lambda c: c.spec.attention.window is not None and c.spec.cache.page is not None,
    "learned sinks": lambda c: c.spec.attention.sinks,
    "pages of 16 tokens": lambda c: c.spec.cache.page == 16,
    "pages of several blocks": lambda c: (c.spec.cache.page or 0) > c.layout.tokens,
    "KV tiles of several pages": lambda c: 0 < (c.spec.cache.page or 0) < int(c.schedule.launch.get("kv_tile", 0)),
    "sink": lambda c: c.spec.cache.sink > 0,
    "local": lambda c: c.spec.cache.local > 0,
    "rollback": lambda c: c.spec.cache.rollback > 0,
    "sink and local": lambda c: c.spec.cache.sink > 0 < c.spec.cache.local,
    "local and rollback": lambda c: c.spec.cache.local > 0 < c.spec.cache.rollback,
    "window and rollback": lambda c: c.spec.attention.window is not None and c.spec.cache.rollback > 0,
    **{f"blocks of {n}": _schedule("cuda", block=n) for n in (16, 32, 64, 128, 256, 512)},
    **{f"{n} warps": _schedule("cuda", warps=n) for n in (2, 4, 6, 8, 12, 16)},
    **{f"KV tiles of {n}": _schedule("cuda", kv_tile=n) for n in (32, 64, 128)},
    **{f"{n} KV tiles in flight": _schedule("cuda", tiles_in_flight=n) for n in (1, 2, 4)},
    **{f"{n} CTAs per SM": _schedule("cuda", ctas_per_sm=n) for n in (1, 2, 3, 4)},
    **{f"copy: {how}": _schedule("cuda", copy=how) for how in ("cp_async", "bulk_stage", "bulk_tile")},
    **{f"reduction: {how}": _schedule("cuda", reduction=how) for how in ("last_cta", "cluster2", "cluster4", "cluster8", "two_level")},
    "exact_q: false": _schedule("cuda", exact_q=False),
}


def rows(case: LifeCase) -> int:
    """Query rows of a KV head."""
    return case.spec.attention.group * case.spec.attention.q_len


def features(case: LifeCase) -> list[str]:
    """Which it has."""
    return [name for name, has in FEATURES.items() if has(case)]


def counted(cases: list[LifeCase]) -> dict[str, int]:
    """Cases of every feature."""
    found = Counter(name for case in cases for name in features(case))
    return {name: found[name] for name in FEATURES}


# --- drawing -------------------------------------------------------------------------------------------------------------


def drawn_gpu_case(draw: Random) -> LifeCase:
    """Mostly CUDA's for SM90; some of TileLang's, some for older targets."""
    kind = draw.random()
    if kind < 0.1:
        return _scheduled(draw, drawn_tilelang_spec(draw), TILELANG, "sm90")
    target: Target = draw.choice(["sm80", "sm89"]) if kind < 0.2 else "sm90"
    return _scheduled(draw, drawn_gpu_spec(draw, target), CUDA, target)


def _scheduled(draw: Random, spec: KernelSpec, backend: Backend, target: Target) -> LifeCase:
    return LifeCase(spec, drawn_schedule(draw, backend, spec, target), target)


def drawn_cases(seed: int, count: int) -> list[LifeCase]:
    """Cases for a GPU, the same on every machine. As long as features lack some, a case is the candidate that has the rarest of these."""
    draw = Random(seed)
    cases: list[LifeCase] = []
    found: Counter[str] = Counter()
    seen: Counter[str] = Counter()

    def best(candidates: list[LifeCase]) -> LifeCase:
        mine = [features(candidate) for candidate in candidates]
        seen.update(name for names in mine for name in names)
        wanted = [sum(max(0, LEAST - found[name]) / seen[name] for name in names) for names in mine]
        return candidates[wanted.index(max(wanted))]

    for _ in range(count):
        lacking = any(found[name] < LEAST for name in FEATURES)
        case = best([drawn_gpu_case(draw) for _ in range(SPECS if lacking else 1)])
        if lacking:
            case = best([case, *(_scheduled(draw, case.spec, get_backend(case.schedule.backend), case.target) for _ in range(SCHEDULES))])
        found.update(features(case))
        cases.append(case)
    return cases
