"""Lowering of linear layers: what it refuses, the memory of a CTA, the defaults, and which launch serves a call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvgen.arch import GPUS
from kvgen.errors import UnsupportedError
from kvgen.lower.backend import get_backend
from kvgen.lower.linear import MOST_DEFAULTS, NO_LAYOUT, rows_of, shared_bytes
from kvgen.lower.schedule import Params, Schedule
from kvgen.registry.entry import Entry
from kvgen.registry.select import by_rows, default_entry, select, serving
from kvgen.registry.store import Store
from kvgen.spec import LinearFormat, LinearShape, LinearSpec

PLAIN = Params(product="mma", rows=16, tiles=2, warps_n=1, warps_k=8, stages=4, split=1, multicast=False, ctas=1)


def spec_of(rows: tuple[int, ...] = (1, 16, 128), **linear: Any) -> LinearSpec:
    workloads = tuple(LinearShape(rows=one) for one in rows)
    return LinearSpec(linear=LinearFormat(**{"n": 6144, "k": 4096, **linear}), workloads=workloads)


@pytest.mark.parametrize(
    ("change", "linear", "told"),
    [
        ({"warps_n": 4}, {}, "4 x 8 warps are more than the 16 of a CTA"),
        ({"warps_k": 16, "tiles": 1}, {"epilogue": "silu_mul"}, "1 warps of 1 tiles does not hold gate and up rows alike"),
        ({"split": 8}, {"k": 1024}, "8 CTAs of 8 warps along k have fewer than one stage each of 8"),
        ({"rows": 128, "tiles": 8, "warps_k": 1}, {}, "sums of 8 tiles and 128 rows exceed the registers"),
        ({"stages": 8}, {}, "rings of 8 stages for 8 groups of warps exceed the shared memory"),
        ({"product": "wgmma"}, {}, "1 warps are no warp groups of four"),
        ({"product": "wgmma", "warps_n": 4, "warps_k": 1, "rows": 8}, {}, "wgmma multiplies 16, 32, 64 or 128 rows"),
        ({"product": "wgmma", "warps_n": 4, "warps_k": 1, "multicast": True}, {}, "warp groups read x from their rings"),
        ({"multicast": True, "split": 8, "warps_k": 4}, {}, "multicast to 8 CTAs along k makes clusters of more than 8"),
        ({"multicast": True}, {"k": 14336}, "exceed the shared memory"),
        ({"rows": 24}, {}, "rows = 24 is not one of 8, 16, 32, 64, 128"),
    ],
)
def test_schedules_that_no_gpu_runs_are_refused(change: dict[str, Any], linear: dict[str, Any], told: str) -> None:
    space = get_backend("cuda").space(spec_of(**linear), "sm90")
    assert space.check(Schedule("cuda", NO_LAYOUT, PLAIN)) == []
    assert any(told in reason for reason in space.check(Schedule("cuda", NO_LAYOUT, Params({**PLAIN, **change}))))


def test_clusters_and_floats_are_refused_by_name() -> None:
    cuda = get_backend("cuda")
    for change in ({"split": 2}, {"multicast": True, "stages": 2, "rows": 8}):
        assert "sm80 has none" in cuda.space(spec_of(), "sm80").check(Schedule("cuda", NO_LAYOUT, Params({**PLAIN, **change})))[0]
    assert cuda.unsupported(spec_of(dtype="float32"), "sm90") == "linear.dtype is float32, and its kernels multiply float16 and bfloat16"
    assert get_backend("tilelang").unsupported(spec_of(), "sm90") == "it has no kernels for the operation linear"
    with pytest.raises(UnsupportedError, match="float32"):
        cuda.defaults(spec_of(dtype="float32"), "sm90")


def test_the_memory_of_a_cta() -> None:
    """Per stage of 128 channels: codes and params of two tiles, and 16 rows of x with 16 bytes between them."""
    linear = spec_of(zero=True, group=64).linear
    assert shared_bytes(linear, PLAIN) == 8 * 4 * (2 * 2 * (16 * 32 + 48) + 16 * (256 + 16))
    shared = Params({**PLAIN, "multicast": True, "split": 4, "stages": 2})  # 8 stages of x, and an mbarrier for every four
    assert shared_bytes(linear, shared) == 8 * 2 * (2 * 2 * (16 * 32 + 48)) + 16 * (8 * 256 + 16) + 2 * 8
    wide = Params({**PLAIN, "rows": 128, "tiles": 8, "warps_n": 4, "warps_k": 1, "stages": 2})
    assert shared_bytes(linear, wide) == 128 * 4 * (16 * 8 * 4 + 4)  # the sums


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("shape", [(28672, 4096, "silu_mul"), (4096, 14336, "add"), (64, 64, "none")])
def test_defaults_cover_every_workload(target: Any, shape: tuple[int, int, str]) -> None:
    n, k, epilogue = shape
    spec = spec_of((1, 8, 16, 32, 64, 128), n=n, k=k, group=64, epilogue=epilogue)
    cuda = get_backend("cuda")
    space, defaults = cuda.space(spec, target), cuda.defaults(spec, target)
    assert len(defaults) <= MOST_DEFAULTS
    assert [problem for one in defaults for problem in space.check(one)] == []
    for work in spec.workloads:
        assert space.check(cuda.default(spec, target, work), work) == []
        assert cuda.default(spec, target, work) in defaults
    assert {rows_of(one.launch) for one in cuda.defaults(spec_of((1, 3)), target)} == {8}


@pytest.mark.parametrize(
    ("target", "rows", "k", "expected"),
    [
        ("sm90", 8, 4096, True),
        ("sm90", 16, 4096, True),
        ("sm90", 16, 14336, False),  # x of half the channels leaves no room for weights
        ("sm90", 32, 4096, False),
        ("sm89", 16, 4096, False),
    ],
)
def test_defaults_multicast_where_x_fits_beside_the_weights(target: Any, rows: int, k: int, expected: bool) -> None:
    (one,) = get_backend("cuda").defaults(spec_of((rows,), n=4096, k=k), target)
    assert one.launch["multicast"] is expected


def test_stages_of_warps_are_no_more_than_their_part_of_k() -> None:
    (one,) = get_backend("cuda").defaults(spec_of((8,), n=4096, k=4096), "sm90")
    assert (one.launch["warps_k"], one.launch["stages"]) == (16, 2)


def entry_of(spec: LinearSpec) -> Entry:
    return default_entry(spec, "cpu", get_backend("cpu"))


def test_a_call_takes_the_launch_of_its_rows_or_the_next_more() -> None:
    spec = spec_of((1, 8, 16))
    (launch,) = entry_of(spec).launches

    def one(rows: int, *workloads: str) -> Any:
        return replace(launch, params=Params({**launch.params, "rows": rows}), workloads=workloads)

    entry = replace(entry_of(spec), launches=(one(8, "rows1"), one(32, "rows8"), one(16, "rows16"), one(64)))
    served = by_rows(entry)
    assert len(served) == 65
    assert [served[m] for m in (0, 1, 2, 8, 9, 16, 17, 32, 33, 64)] == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3]
    found = serving(entry, spec, LinearShape(rows=12))
    assert found is not None
    assert (found.index, found.why) == (2, "compiled for 16 rows")


def test_an_entry_of_fewer_rows_is_passed_over(tmp_path: Any) -> None:
    spec = spec_of((1, 8))
    entry = entry_of(spec)
    fewer = replace(entry, launches=tuple(replace(one, params=Params({**one.params, "rows": 8})) for one in entry.launches))
    store = Store(tmp_path)
    store.put(fewer)
    assert "its launches take 8 rows, and 16 are asked for" in " ".join(select(spec_of((16,)), "cpu", stores=[store]).why)
    assert store.put(entry).name == "linear-n6144k4096-float16-w4g128s.json"
