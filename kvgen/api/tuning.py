"""`build`: tune a spec for this machine and register the winner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgen.extras import require
from kvgen.spec import AnySpec, load_any_spec

if TYPE_CHECKING:
    from kvgen.tune.budget import Watch
    from kvgen.tune.tuner import TuningResult


def build(
    spec: AnySpec | str | Path | Mapping[str, Any],
    *,
    budget: str | float | None = None,
    trials: int | None = None,
    backends: Sequence[str] | None = None,
    seed: int = 0,
    storage: str | None = None,
    progress: Watch | None = None,
    all_schedules: bool = False,
) -> TuningResult:
    """Search schedules of a spec within `budget` (seconds, or text like "3m") and `trials` measurements; register the winner.

    With neither bound the whole space is measured. `backends` are names; by default all that support the spec.
    `storage` is a database URL that several hosts share. `progress` is called at every step. `all_schedules` also
    searches what the hints of the search spaces exclude.

    Returns the result: the registered entry with its timings, and why it won. The next `get_kernel` sees the entry.
    Raises SpecError, UnsupportedError, MeasureError where no schedule is right, ToolchainMissing where a compiler, a device or a
    package of `kvgen[build]` is absent, KvgenError, TypeError or ValueError for wrong back ends, budgets or trials, and KeyboardInterrupt
    where there is nothing right to register yet.
    """
    require("kvgen.build", "optuna")
    from kvgen.api.fetch import forget
    from kvgen.lower.backend import get_backend
    from kvgen.tune.budget import Budget, parse_duration
    from kvgen.tune.tuner import tune

    seconds = parse_duration(budget) if isinstance(budget, str) else budget
    if isinstance(backends, str) or (backends is not None and not backends):
        raise ValueError(f'backends must be names, such as ["cuda", "tilelang"], or None for all, not {backends!r:.60}')
    chosen = [get_backend(name) for name in backends] if backends is not None else None
    try:
        return tune(
            load_any_spec(spec),
            budget=Budget(trials, seconds),
            backends=chosen,
            seed=seed,
            storage=storage,
            progress=progress,
            all_schedules=all_schedules,
        )
    finally:
        forget()
