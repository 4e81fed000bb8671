"""The GPU variants that faults are planted in: head_dim 64 and small KV tiles, so that each compiles in ten to twenty seconds."""

from __future__ import annotations

from benchmarks.gpu_words import spec_of, workload_of
from tests.mutants.fault import Case


def _case(name: str, spec: str, schedule: str, workloads: str, backend: str = "cuda") -> Case:
    """Words of benchmarks/gpu_words.py."""
    return Case(name, backend, spec_of(spec, "sm90", [workload_of(word) for word in workloads.split()]), schedule)


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _case("last", "k4v4:h8/2:d64", "w8u1d2", "1x32768 4x4096"),
        _case("batch", "k4v4:h8/2:d64", "w8u1d2", "136x512"),
        _case("residual", "k4v4:h8/2:d64", "w4u1d2c2", "136x512"),
        _case("cluster", "k4v4:h8/2:d64", "w8u1d2.cl4", "1x16384"),
        _case("two-level", "k4v4:h4/1:d64", "w8u1d2.two", "1x65536"),
        _case("planned", "k4v4:h8/2:d64", "w8u2d1", "8x4096 1x65536"),
        _case("planned-batch", "k4v4:h8/2:d64", "w8u2d1", "136x1024"),
        _case("planned-many", "k4v4:h8/2:d64", "w8u2d1", "1100x256"),
        _case("planned-heads", "k4v4:h12/3:d64", "w8u2d1", "9x4096 12x2048"),
        _case("bulk", "k4v4:h8/2:d64", "w8u1d2.bulk", "4x4096"),
        _case("bulk-tile", "k4v4:h8/2:d64", "w8u2d2.tile", "4x4096"),
        _case("paged", "k4v4:h8/2:d64:kg64:page128", "n64.w8u1d2", "12x8192"),
        _case("key-groups", "k4v4:h8/2:d64:kg64", "n128.w8u1d2", "4x4096"),
        _case("gathered", "k4v4:token:page16:h8/2:d64", "n16.w8u1d4", "4x2048"),
        _case("window", "k4v4:h8/2:d64:kg64:window100", "n128.w8u1d2", "4x4096"),
        _case("gathered-window", "k4v4:token:page16:h8/2:d64:q3:window100", "n16.w8u1d4", "4x2048q3"),
        _case("narrow-window", "k4v4:token:page16:h8/2:d64:window5", "n16.w8u1d4", "4x2048"),
        _case("cap", "k4v4:h8/2:d64:cap5", "w8u1d2", "4x4096"),
        _case("token", "k4v4:token:kg32:vg32:h8/2:d64", "w8u1d2", "4x2048"),
        _case("symmetric", "k8v8:token:sym:h8/2:d64", "w8u1d2", "4x2048"),
        _case("queries", "k4v4:q4:h8/2:d64", "w8u1d2", "1x8192q4 4x2048q2"),
        _case("half-run", "k4v4:h8/2:d80", "w8u1d2", "4x2048"),
        _case("half-run-groups", "k4v2:kg64:vg16:h8/2:d48", "n64.w8u2d1", "4x2048"),
        _case("half-run-token", "k2v4:token:d48:kg48:vg48:h8/2", "w8u1d2", "4x2048"),
        _case("half-run-boost", "k2v2:kg64:vchannel:vg32:h8/2:d80:boost3/5", "n64.w8u2d1", "4x2048"),
        _case("runs", "k4v4:q8:h24/2:d64:kg64", "n64.w4u1d2", "1x8192q8 4x2048q8"),
        _case("int2", "k2v2:h8/2:d64", "w8u2d2", "4x2048"),
        _case("integers", "k4v4:kg64:h8/2:d64", "n128.w8u4d2.noexact", "4x2048"),
        _case("boost", "k2v2:h8/2:d96:kg64:boost1/2", "n128.w8u1d2", "4x2048"),
        _case("value-groups", "k4v4:vg32:h8/2:d64", "w8u1d2", "4x2048"),
        _case("value-channel", "k8v8:vchannel:sym:h8/2:d64", "w8u2d1", "4x4096"),
        _case("channel-groups", "k2v4:kg16:vchannel:vg32:h8/2:d64", "w8u2d1", "4x4096"),
        _case("split-groups", "k2v4:kg48:vchannel:vg48:h8/2:d64", "w8u1d2", "4x4096"),
        _case("unquantized", "k4v4:kg64:sink21:local5:rollback8:sinks:h8/2:d64", "n64.w8u1d2", "4x2048"),
        _case("sizes", "k4v4:h8/2:d64", "w8u1d2", "4x2048"),
        _case("sizes-far", "k4v4:h8/2:d64", "w8u1d2", "4x2048"),
        _case("sizes-batch", "k4v4:h8/2:d64", "w8u1d2", "4x2048"),
        _case("sizes-paged", "k4v4:h8/2:d64:kg64:page128", "n64.w8u1d2", "4x2048"),
        _case("sizes-window", "k4v4:h8/2:d64:kg64:window40000", "n128.w8u1d2", "4x4096"),
        _case("sizes-rollback", "k4v4:kg64:rollback70:h8/2:d64", "n64.w8u1d2", "4x2048"),
        _case("tilelang", "k4v4:h8/2:d64", "w8u2s4", "1x32768 4x2048", "tilelang"),
        _case("tilelang-queries", "k4v4:q4:h4/2:d64:page128", "w8u2s4", "4x2048q4", "tilelang"),
    )
}
