"""The small variants that faults are planted in: each has what some lines of the headers need to be executed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from benchmarks.gpu_words import schedules_of, spec_of, workload_of
from kvgen.arch import Arch, Target
from kvgen.lower.backend import Source, get_backend
from kvgen.lower.schedule import Params, Schedule
from kvgen.spec import AnySpec, KernelSpec, LinearFormat, LinearShape, LinearSpec, Workload
from tests.support.cpu import matrix_spec
from tests.support.cpu import spec_of as cpu_spec


@dataclass(frozen=True)
class Case:
    """A variant, verified at the workloads of its spec. `words`: a schedule of benchmarks/gpu_words.py, with `changes`."""

    name: str
    spec: AnySpec
    words: str = "default"
    changes: tuple[tuple[str, int | str], ...] = ()

    @property
    def target(self) -> Target:
        """GPU cases are compiled for an H100 or H200."""
        return "cpu" if self.spec.arch == "cpu" else "sm90"

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule."""
        base = schedules_of(self.words, get_backend(self._backend), self.spec, self.target)[0]
        changes: dict[str, Any] = dict(self.changes)
        layout = Params({**base.layout, **{name: changes.pop(name) for name in ("block",) if name in changes}})
        return Schedule(base.backend, layout, Params({**base.launch, **changes}))

    @cached_property
    def source(self) -> Source:
        """The rendered source. Raises what lowering raises."""
        return get_backend(self._backend).lower(self.spec, self.schedule, self.target)

    @property
    def _backend(self) -> str:
        return "cpu" if self.target == "cpu" else "cuda"


def _spec(heads: str, dim: int, k: str, v: str, workloads: str, page: int = 0, **sections: Any) -> KernelSpec:
    """`workloads` are batch x kv_len, or batch x kv_len x q_len."""
    works = [dict(zip(("batch", "kv_len", "q_len"), map(int, word.split("x")), strict=False)) for word in workloads.split()]
    return replace(cpu_spec(heads, dim, k=k, v=v, page=page, **sections), workloads=tuple(Workload(**work) for work in works))


def _case(name: str, spec: AnySpec, **changes: int | str) -> Case:
    return Case(name, spec, changes=tuple(changes.items()))


def _gpu(name: str, spec: str, schedule: str, workloads: str) -> Case:
    """Words of benchmarks/gpu_words.py. head_dim 64 and small KV tiles compile in ten to twenty seconds."""
    return Case(name, spec_of(spec, "sm90", [workload_of(word) for word in workloads.split()]), schedule)


def _linear(name: str, arch: Arch, n: int, k: int, rows: int, linear: dict[str, Any], **launch: int | str) -> Case:
    """A linear layer; `rows` are timed, and on a GPU the most that the launch takes. Of a GPU's launch, what is not named is 1."""
    spec = LinearSpec(arch=arch, linear=LinearFormat(n=n, k=k, **linear), workloads=(LinearShape(rows=rows),))
    plain = {"product": "mma", "rows": rows, "stages": 2, "multicast": False}
    plain |= dict.fromkeys(("tiles", "warps_n", "warps_k", "split", "ctas"), 1)
    return _case(name, spec, **({**plain, **launch} if arch != "cpu" else launch))


GATED = {"epilogue": "silu_mul"}
CASES: dict[str, dict[str, Case]] = {
    suite: {case.name: case for case in cases}
    for suite, cases in {
        "cpu": (
            _case("splits", _spec("4/1", 64, "4c32", "4t64", "1x32768 2x4096")),
            _case("splits-q4", _spec("4/1", 32, "4c32", "4t32", "1x16384x4 2x300", q_len=4)),
            _case("batch", _spec("2/1", 32, "4c32", "4t32", "136x320")),
            _case("paged", _spec("4/2", 64, "4c64", "4t64", "12x700 1x5000", page=128), block=64),
            _case("window", _spec("4/2", 64, "4c64", "4t64", "2x1500 3x700x3", window=200, softcap=30.0, q_len=3)),
            _case("token", _spec("4/2", 64, "4t32", "8t16", "3x900")),
            _case("value-channel", _spec("4/1", 64, "4c32", "4c32", "3x900"), block=128),
            _case("heads", _spec("8/4", 32, "4c32", "4t32", "2x900x3", q_len=3)),
            _case("boost", _spec("4/1", 80, "2c32+4mean_abs", "2t80", "2x900")),
            _case("int8", _spec("4/1", 64, "8c64", "8t64", "2x900")),
            _case(
                "unquantized", _spec("4/2", 64, "4c32", "4t32", "2x900", sinks=True, cache={"sink": 5, "local": 40, "rollback": 9}),
                block=64,
            ),
            _case("integers", _spec("4/1", 64, "8c32", "4t64", "1x5000 2x900"), dot="int16"),
            _case("rollback-far", _spec("4/1", 64, "4c32", "4t32", "2x900", cache={"rollback": 70}), block=32),
            _case("window-far", _spec("16/16", 64, "8c64", "8t64", "2x900", window=40000)),
            _case("rotated", _spec("4/1", 64, "4t64~64", "4t64~32u", "2x900")),
            _case("static", _spec("4/2", 64, "8@head", "4@channel", "2x900")),
            _case("arrival", _spec("4/2", 64, "4t64", "4t64", "2x900 3x70", cache={"quantize": "arrival"}), block=64),
            _case("matrix", matrix_spec(shapes=("700x300",)), rows=16),
            _case("prompt", _spec("16/1", 64, "4c64", "4t64", "1x8192x8 2x300x8", q_len=8)),
            _linear("linear", "cpu", 144, 384, 9, {"group": 64, "zero": True, "bias": True}, tiles=2),
            _linear(
                "linear-gated", "cpu", 96, 256, 4,
                {"bits": 8, "group": "row", "zero": True, "dtype": "bfloat16", "bias": True, **GATED},
            ),
            _linear("linear-floats", "cpu", 144, 256, 5, {"zero": True, "dtype": "float32", "epilogue": "add"}),
        ),
        "cuda": (
            _gpu("last", "k4v4:h8/2:d64", "w8u1d2", "1x32768 4x4096"),
            _gpu("cluster", "k4v4:h8/2:d64", "w8u1d2.cl4", "1x16384"),
            _gpu("planned", "k4v4:h8/2:d64", "w8u2d1", "8x4096 1x65536"),
            _gpu("bulk", "k4v4:h8/2:d64", "w8u1d2.bulk", "4x4096"),
            _gpu("paged", "k4v4:h8/2:d64:kg64:page128", "n64.w8u1d2", "12x8192"),
            _gpu("gathered", "k4v4:token:page16:h8/2:d64", "n16.w8u1d4", "4x2048"),
            _gpu("window", "k4v4:h8/2:d64:kg64:window100", "n128.w8u1d2", "4x4096"),
            _gpu("cap", "k4v4:h8/2:d64:cap5", "w8u1d2", "4x4096"),
            _gpu("symmetric", "k8v8:token:sym:h8/2:d64", "w8u1d2", "4x2048"),
            _gpu("queries", "k4v4:q4:h8/2:d64", "w8u1d2", "1x8192q4 4x2048q2"),
            _gpu("integers", "k4v4:kg64:h8/2:d64", "n128.w8u4d2.noexact", "4x2048"),
            _gpu("boost", "k2v2:h8/2:d96:kg64:boost1/2", "n128.w8u1d2", "4x2048"),
            _gpu("value-groups", "k4v4:vg32:h8/2:d64", "w8u1d2", "4x2048"),
            _gpu("channel-groups", "k2v4:kg16:vchannel:vg32:h8/2:d64", "w8u2d1", "4x4096"),
            _gpu("unquantized", "k4v4:kg64:sink21:local5:rollback8:sinks:h8/2:d64", "n64.w8u1d2", "4x2048"),
            _gpu("rotated", "k4v4:token:h8/2:d64:krot64:vrot32u", "n64.w8u1d2", "4x2048"),
            _gpu("static", "k8v4:kscale-channel:vscale-head:h8/2:d64", "n64.w8u1d2", "4x2048"),
            _gpu("two-levels", "knvfp4vnvfp4:kscale-head:vscale-tensor:h8/2:d64", "n64.w8u1d2", "4x2048"),
            _gpu("arrival", "k4v4:token:arrival:h8/2:d64", "n64.w8u1d2", "4x2048 3x75"),
            _gpu("arrival-static", "k8v4:kscale-channel:vscale-head:arrival:h8/2:d64", "n64.w8u1d2", "4x2048 3x75"),
            _gpu("sizes", "k4v4:h8/2:d64", "w8u1d2", "4x2048"),
            _gpu("sizes-far", "k4v4:h8/2:d64", "w8u1d2", "4x2048"),
            _gpu("sizes-batch", "k4v4:h8/2:d64", "w8u1d2", "4x2048"),
            _gpu("sizes-paged", "k4v4:h8/2:d64:kg64:page128", "n64.w8u1d2", "4x2048"),
            _linear("linear-few", "sm90", 64, 640, 8, {"bias": True}, tiles=2, warps_k=2, stages=3),
            _linear(
                "linear-cluster", "sm90", 80, 1152, 16,
                {"group": 64, "zero": True, "dtype": "bfloat16", "epilogue": "add"}, warps_n=2, warps_k=2, split=2,
            ),
            _linear(
                "linear-rows", "sm90", 128, 512, 8,
                {"bits": 8, "group": "row", "zero": True, "dtype": "bfloat16", "bias": True, **GATED}, tiles=2, warps_n=2,
            ),
            _linear("linear-multicast-split", "sm90", 80, 1152, 16, {"bias": True}, warps_k=2, split=2, multicast=True, stages=3),
            _linear("linear-multicast", "sm90", 64, 640, 8, {"bits": 8, "group": 64}, tiles=2, warps_n=2, multicast=True),
            _linear("linear-many", "sm90", 48, 512, 64, {"bits": 8, "group": 64}, warps_n=2, warps_k=2),
            _linear(
                "linear-wide", "sm90", 96, 640, 32,
                {"group": 64, "zero": True, "bias": True, **GATED}, product="wgmma", tiles=2, warps_n=4, stages=3,
            ),
            _linear(
                "linear-wide-cluster", "sm90", 64, 640, 16,
                {"bits": 8, "zero": True, "dtype": "bfloat16"}, product="wgmma", warps_n=4, warps_k=2, split=2, stages=3,
            ),
        ),
    }.items()
}  # fmt: skip
