"""Decode attention on this GPU: several formats and shapes beside torch's kernels and FlashInfer, with the read ceiling.

    python -m benchmarks.gpu_compare [--build 8m] [--only int4] [--sustained 2] [--alone]

Takes what is registered (or, with --build, tunes first), and writes benchmarks/results/gpu_<device>.csv.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.command import parser
from benchmarks.output import RESULTS
from kvgen.bench.run import Row, write_csv
from kvgen.cli.bench import facts, providers, run, show
from kvgen.measure.job import TimingPolicy
from kvgen.registry.device import here
from kvgen.registry.paths import slug
from kvgen.spec import KernelSpec, load_spec
from kvgen.spec.target import resolve

LLAMA = [(8, 32768), (32, 8192), (128, 8192), (1, 131072), (1, 4096), (7, 5120), (13, 20000)]


def channel_token(key_bits: int, value_bits: int) -> dict[str, Any]:
    """K per channel, V per token, groups of 128."""
    return {
        "key": {"bits": key_bits, "axis": "channel", "group": 128},
        "value": {"bits": value_bits, "axis": "token", "group": 128},
    }


def token_token(bits: int) -> dict[str, Any]:
    """K and V per token, one group per head."""
    quant = {"bits": bits, "axis": "token", "group": 128}
    return {"key": quant, "value": dict(quant)}


def spec(name: str, quant: dict[str, Any], heads: tuple[int, int], workloads: list[tuple[int, int]]) -> KernelSpec:
    """fp16, head_dim 128."""
    attention = {"q_heads": heads[0], "kv_heads": heads[1], "head_dim": 128, "dtype": "float16"}
    shapes = [{"batch": batch, "kv_len": kv_len} for batch, kv_len in workloads]
    return load_spec({"name": name, "arch": "native", "attention": attention, **quant, "workloads": shapes})


def specs() -> Iterator[KernelSpec]:
    """Every row of the table."""
    for bits in (8, 4, 2):
        quant = channel_token(bits, bits)
        yield spec(f"int{bits}-32-8", quant, (32, 8), LLAMA)
        yield spec(f"int{bits}-32-32", quant, (32, 32), [(8, 8192)])
        yield spec(f"int{bits}-8-1", quant, (8, 1), [(64, 32768), (1, 131072)])
    for bits in (8, 4):
        yield spec(f"int{bits}-per-token-32-8", token_token(bits), (32, 8), LLAMA[:4])
    yield spec("k8v4-32-8", channel_token(8, 4), (32, 8), LLAMA[:2])
    yield spec("k4v2-32-8", channel_token(4, 2), (32, 8), LLAMA[:2])


def main() -> None:
    """Build if asked, compare, write."""
    from kvgen.api import build

    command = parser(__doc__)
    command.add_argument("--build", metavar="BUDGET", help="tune each format first, e.g. 8m")
    command.add_argument("--only", help="formats whose name holds this")
    command.add_argument("--alone", action="store_true", help="without the others")
    command.add_argument("--call", choices=["attend", "decode"], default="attend")
    command.add_argument("--sustained", type=float, default=0.0, help="seconds of load before each turn")
    command.add_argument("--rounds", type=int, default=7)
    arguments = command.parse_args()
    policy = TimingPolicy(call=arguments.call, seconds=0.05, samples=15, sustained_seconds=arguments.sustained)
    target = resolve("native")
    rows: list[Row] = []
    name = "-".join(["gpu", slug(str(here(target)["name"])), arguments.call, *(["sustained"] if arguments.sustained else [])])
    for chosen in specs():
        if arguments.only and arguments.only not in chosen.name:
            continue
        if arguments.build:
            build(chosen, budget=arguments.build)
        others = [] if arguments.alone else providers(chosen, target, None)
        found = run(chosen, target, others, policy, arguments.rounds)
        show(found)
        rows += found
        write_csv(RESULTS / f"{name}.csv", rows, facts(target, policy))


if __name__ == "__main__":
    main()
