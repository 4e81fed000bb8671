"""Decode attention of Llama-3.1-8B on this CPU: int8, int4 and int2 caches beside torch, in one process with the same threads.

    python -m benchmarks.cpu_llama31 [--budget 2m] [--no-build]

Tunes each format (a later run goes on from there), then writes benchmarks/results/cpu_llama31.csv.
"""

from __future__ import annotations

from benchmarks import output
from benchmarks.command import parser
from kvgen.cli.bench import facts, pin_threads, show
from kvgen.spec import KernelSpec, load_spec

RESULTS = output.RESULTS / "cpu_llama31.csv"
BITS = (8, 4, 2)


def spec_of(bits: int) -> KernelSpec:
    """K per channel and V per token in groups of 128."""
    quant = {"bits": bits, "group": 128}
    return load_spec(
        {
            "name": f"llama31-8b-kv{bits}",
            "arch": "cpu",
            "attention": {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "float16"},
            "key": {**quant, "axis": "channel"},
            "value": {**quant, "axis": "token"},
            "workloads": [{"batch": 1, "kv_len": 4096}, {"batch": 1, "kv_len": 32768}],
        }
    )


def main() -> None:
    """Build, compare, write."""
    pin_threads()
    import torch

    from kvgen.api import build, get_kernel
    from kvgen.bench.ours import Ours
    from kvgen.bench.run import Row, compare, write_csv
    from kvgen.bench.torch_sdpa import cpu_providers
    from kvgen.measure.bytes import half_full
    from kvgen.measure.job import TimingPolicy

    command = parser(__doc__)
    command.add_argument("--budget", default="2m", help="tuning time per format")
    command.add_argument("--no-build", action="store_true", help="take what is registered")
    command.add_argument("--rounds", type=int, default=25)
    arguments = command.parse_args()
    policy = TimingPolicy(seconds=0.06, warmup_seconds=0.02, samples=15, threads=torch.get_num_threads())
    rows: list[Row] = []
    for bits in BITS:
        spec = spec_of(bits)
        if not arguments.no_build:
            build(spec, budget=arguments.budget, backends=["cpu"])
        kernel = get_kernel(spec)
        rows += compare(
            spec,
            "cpu",
            spec.workloads,
            [Ours(kernel), *cpu_providers()],
            lambda work, kernel=kernel: half_full(kernel.spec, kernel.layout, work.kv_len),  # type: ignore[misc]
            policy=policy,
            rounds=arguments.rounds,
        )
        show([row for row in rows if row.spec == spec.name])
        write_csv(RESULTS, rows, facts("cpu", policy))


if __name__ == "__main__":
    main()
