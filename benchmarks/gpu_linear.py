"""Products of few rows with packed weights, beside a read of the packed bytes, cuBLAS over 16 bits, torch's int4 and Humming.

    python benchmarks/gpu_linear.py [NxK…] [--rows 1,4,8,16,32,64,128] [--bits 4] [--tries 4] [--peers] [--rounds 5]

The shapes are by default those of Llama-3.1-8B's layers and one of Llama-3.1-70B's. For each number of rows the default launch, what
entries that ship chose for the matrix, with any epilogue, and the first launches of `--tries` other shapes of CTAs are compiled, and timed
in turns; the fastest is verified against the fp64 reference.
Weights are rotated beyond the L2 cache, calls replayed in a CUDA graph. `default_us` is the time of the default. `--peers`: torch.matmul
over 16 bits, torch's `_weight_int4pack_mm`, and Humming (package humming-kernels) take turns with them, where they are installed. Rows go
to $OUT (or benchmarks/results) as GPU_linear.csv after every shape. `one launch` is the default for the most rows that are asked for: with
it alone, a row's bits depend on no other (docs/linear.md). Exits with 1 where a launch does not compile or is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.common import gpu_facts, gpu_word, parser, take_turns, write_rows
from kvgen._machine import cores
from kvgen.errors import CheckError
from kvgen.lower.linear import CUDA, NO_LAYOUT, launches, rows_of
from kvgen.lower.schedule import Params, Schedule
from kvgen.measure.inputs import LinearInputs
from kvgen.measure.measurement import TimingPolicy
from kvgen.measure.read_roofline import read_roofline
from kvgen.measure.timer import cold_bytes, timer_for
from kvgen.registry.store import packaged_store
from kvgen.runtime.linear import LinearVariant, load_linear
from kvgen.spec import LinearShape, LinearSpec
from kvgen.spec.load import load_as
from kvgen.toolchain.compile import build_many
from kvgen.verify.linear import LinearCheck

TARGET = "sm90"
POLICY = TimingPolicy(seconds=0.02, warmup_seconds=0.01, samples=7)
SHAPES = ("6144x4096", "4096x4096", "28672x4096", "4096x14336", "7168x8192")
ROWS = (1, 4, 8, 16, 32, 64, 128)
COMPILED = (8, 16, 32, 64, 128)
GROUP = 128


def main() -> int:
    command = parser(__doc__, rounds=5)
    command.add_argument("shapes", nargs="*", default=SHAPES)
    command.add_argument("--rows", default=",".join(map(str, ROWS)))
    command.add_argument("--bits", type=int, default=4)
    command.add_argument("--tries", type=int, default=4)
    command.add_argument("--peers", action="store_true")
    asked = command.parse_args()
    wanted = [int(m) for m in asked.rows.split(",")]
    plans = {}
    for shape in asked.shapes:
        n, k = map(int, shape.split("x"))
        spec = load_as(LinearSpec, {"operation": "linear", "arch": TARGET, "linear": {"n": n, "k": k, "bits": asked.bits, "group": GROUP}})
        plans[shape] = spec, {rows: tried(spec, rows, asked.tries) for rows in sorted({compiled(m) for m in wanted})}
    by_spec = {(spec, one): CUDA.lower(spec, one, TARGET) for spec, tries in plans.values() for found in tries.values() for one in found}
    sources = list({source.id: source for source in by_spec.values()}.values())
    built = {sources[number].id: artifact for number, artifact in build_many(sources, cores())}
    failed, rows = False, []
    for shape, (spec, tries) in plans.items():
        largest = tries[max(tries)][0]
        for m in wanted:
            found, variants = tries[compiled(m)], {}
            for one in found:
                artifact = built[by_spec[spec, one].id]
                if isinstance(artifact, Exception):
                    print(f"{shape} {one}: {artifact}", flush=True)
                    failed = True
                else:
                    variants[str(one)] = load_linear(spec, artifact.path, TARGET, rows_of(one.launch))
            artifact = built[by_spec[spec, largest].id]
            most = {} if isinstance(artifact, Exception) else {"one launch": load_linear(spec, artifact.path, TARGET, max(tries))}
            failed |= measured(rows, shape, spec, m, str(found[0]), variants, most, asked.peers, asked.rounds)
            write_rows(f"{gpu_word()}_linear", rows, gpu_facts(POLICY))
    return int(failed)


def compiled(m: int) -> int:
    """The rows that a launch for m rows is compiled for."""
    return min(rows for rows in COMPILED if rows >= m)


def tried(spec: LinearSpec, rows: int, tries: int) -> list[Schedule]:
    """The default, the entries', and the first two rings of each of the first shapes of CTAs."""
    default = next(one for one in CUDA.defaults(spec, TARGET) if rows_of(one.launch) == rows)
    shapes: dict[tuple[int, ...], dict[int, Params]] = {}
    for launch in launches(spec, TARGET, rows):
        shape = tuple(int(launch[name]) for name in ("tiles", "warps_n", "split", "multicast"))
        shapes.setdefault(shape, {}).setdefault(launch.integer("warps_k"), launch)
    first = [ring for rings in list(shapes.values())[:tries] for ring in list(rings.values())[:2]]
    return list(dict.fromkeys([default, *(Schedule(CUDA.name, NO_LAYOUT, launch) for launch in [*entries(spec, rows), *first])]))


def entries(spec: LinearSpec, rows: int) -> list[Params]:
    """What entries that ship chose for the matrix and so many rows."""
    found = [one.entry for one in packaged_store().all() if one.entry is not None and isinstance(one.entry.spec, LinearSpec)]
    same = [one for one in found if replace(one.spec.linear, epilogue="none") == spec.linear]
    return [launch.params for one in same for launch in one.launches if rows_of(launch.params) == rows]


def measured(
    rows: list[dict[str, Any]],
    shape: str,
    spec: LinearSpec,
    m: int,
    default: str,
    variants: dict[str, LinearVariant],
    further: dict[str, LinearVariant],
    peers: bool,
    rounds: int,
) -> bool:
    """Adds the rows of a shape and a number of rows of x; whether the fastest launch is wrong."""
    work = LinearShape(rows=m)
    inputs = LinearInputs(next(iter(variants.values())), work, "cuda")
    timers: dict[str, Callable[[], Any]] = {name: partial(inputs.time, one, POLICY) for name, one in {**variants, **further}.items()}
    named = dict(timers)
    if peers:
        named |= {name: partial(timer_for("cuda").time, calls, POLICY) for name, calls in others(spec, m)}
    samples, read = take_turns(named, rounds, {inputs.nbytes: partial(read_roofline(TARGET).samples, inputs.nbytes, POLICY)})
    us = {name: median(found) for name, found in samples.items()}
    read_us = median(read[inputs.nbytes])
    best = min(variants, key=us.__getitem__)
    chosen = {"kvgen": best, **{name: name for name in us if name not in variants}}
    for provider, name in chosen.items():
        about = {"provider": provider, "schedule": name if provider == "kvgen" else "", "us": us[name]}
        about |= {"default_us": us[default]} if provider == "kvgen" else {}
        rows.append({"shape": shape, "rows": m, "bits": spec.linear.bits, "bytes": inputs.nbytes, "read_us": read_us, **about})
        print(f"{shape:>12} {m:>4} rows  {provider:<10} {us[name]:8.2f} µs  {read_us / us[name]:.3f} of the read  "
              f"{f'default {us[default]:.2f}  {best}' if provider == 'kvgen' else ''}", flush=True)  # fmt: skip
    for name in variants:
        print(f"    {us[name]:8.2f} {name}")
    try:
        check = LinearCheck(variants[best], "cuda")
        check.prepare()
        check.run()
    except CheckError as error:
        print(f"{shape} {best}: {error}", flush=True)
        return True
    return False


def others(spec: LinearSpec, m: int) -> Iterator[tuple[str, Sequence[Callable[[], object]]]]:
    """What others have: a call for each copy of the weights."""
    n, k = spec.linear.n, spec.linear.k

    def copies(nbytes: int) -> range:
        return range(max(1, -(-cold_bytes("cuda") // nbytes)))

    x, out = torch.randn(m, k, device="cuda").half(), torch.empty(m, n, device="cuda").half()
    whole = [torch.randn(n, k, device="cuda").half() for _ in copies(2 * n * k)]
    yield "cublas", [partial(torch.mm, x, w.T, out=out) for w in whole]
    if spec.linear.bits != 4:
        return
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    packed = torch._convert_weight_to_int4pack(codes, 8)
    params = torch.rand(k // GROUP, n, 2, device="cuda").bfloat16()
    xb = x.bfloat16()
    held = [(packed.clone(), params.clone()) for _ in copies(n * k // 2)]
    yield "torch int4", [partial(torch._weight_int4pack_mm, xb, w, GROUP, p) for w, p in held]
    try:
        from humming.layer import HummingLayer
    except ImportError:
        return
    layer = HummingLayer(shape_n=n, shape_k=k, weight_config={"dtype": "int4", "group_size": GROUP}, torch_dtype=torch.float16).cuda()
    layer.load_from_unquantized(whole[0])
    layer.transform()
    yield "humming", [partial(one, x) for one in (layer, *(deepcopy(layer) for _ in copies(n * k // 2)[1:]))]


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
