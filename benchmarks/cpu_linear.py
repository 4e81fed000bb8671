"""Linear layers over 4- and 8-bit weights on a CPU, beside torch, ONNX Runtime and a pure read.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python -m benchmarks.cpu_linear [--threads 2] [--rounds 9] [--shapes 4096x4096 …]

The variable gives everyone's weights huge pages, without which a read takes up to twice as long.

Copies of each weight fill more memory than caches hold (SmolLM2-135M's: as much as the whole model), and a turn multiplies by each copy
once. Groups of 64 channels, bfloat16; the kernels are the back end's defaults, or the registry's entries. Others:

- torch over bfloat16 weights, `_weight_int4pack_mm_for_cpu` (groups of 64), `_weight_int8pack_mm` (a scale for each row);
- ONNX Runtime's MatMulNBits in float32, blocks of 64, with products in float32 and (accuracy level 4: column `onnx_fast`) over activations
  rounded to 8 bits, which no other one does; where `onnxruntime` and `onnx` are installed.

Times are medians of the rounds; `of_read` is the time of a pure read of the packed bytes, of the same number of copies, over the kernel's.
Writes $OUT (or benchmarks/results)/cpu_linear.csv.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch.nn.functional import linear as torch_linear

from benchmarks.common import parser, take_turns, write_rows
from kvgen import FallbackWarning, get_linear_kernel
from kvgen.bench.run import facts
from kvgen.measure.measurement import TimingPolicy
from kvgen.measure.read_roofline import source
from kvgen.runtime.module import load_library
from kvgen.toolchain import build

LARGE, SMALL = 256 << 20, 96 << 20
"""Bytes of all copies of a weight: beyond caches, and those of the model of 135M."""
SHAPES = {  # n x k: bits, bytes of copies
    "4096x4096": ((4, 8), LARGE),
    "14336x4096": ((4, 8), LARGE),
    "4096x14336": ((4,), LARGE),
    "960x576": ((4,), SMALL),
    "576x576": ((4,), SMALL),
    "3072x576": ((4,), SMALL),
    "576x1536": ((4,), SMALL),
    "49152x576": ((4, 8), SMALL),
}
ROWS = (1, 4, 8, 16)
GROUP, PIECE = 64, 4096
Pass = Callable[[], object]
"""Multiplies by every copy once."""


def kvgen_pass(n: int, k: int, bits: int, weight: torch.Tensor, x: torch.Tensor, copies: int, threads: int) -> tuple[Pass, int]:
    """The pass, and the bytes of a packed weight."""
    linear = {"n": n, "k": k, "bits": bits, "group": GROUP, "dtype": "bfloat16"}
    kernel = get_linear_kernel({"operation": "linear", "arch": "cpu", "linear": linear, "workloads": [{"rows": len(x)}]})
    kernel.set_threads(threads)
    packed = kernel.quantize(weight)
    out = torch.empty((len(x), n), dtype=x.dtype)
    all_copies = packed.repeat(copies, 1)
    return lambda: [kernel(x, one, out=out) for one in all_copies], packed.numel()


def read_pass(nbytes: int, copies: int, threads: int) -> Pass:
    """A pure read of as many bytes."""
    library = load_library(build(source("cpu")).path)
    library.get_function("set_threads")(threads)
    read, sink = library.get_function("read"), torch.zeros(PIECE, dtype=torch.uint8)
    size = -(-nbytes // PIECE) * PIECE
    buffers = torch.ones((copies, size), dtype=torch.uint8)
    return lambda: [read(one, sink) for one in buffers]


def torch_passes(n: int, k: int, bits: int, weight: torch.Tensor, x: torch.Tensor, copies: int) -> Iterator[tuple[str, Pass]]:
    wide = weight.to(x.dtype).repeat(max(2, copies * bits // 16), 1, 1)
    yield "torch_bf16", lambda: [torch_linear(x, one) for one in wide]  # as many bytes
    if bits == 4:
        codes = torch.randint(0, 16, (n, k), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        params = torch.rand((k // GROUP, n, 2)).to(x.dtype)
        all_copies = packed.repeat(copies, 1, 1)
        yield "torch_int4", lambda: [torch.ops.aten._weight_int4pack_mm_for_cpu(x, one, GROUP, params) for one in all_copies]
    else:
        all_copies = torch.randint(-128, 128, (copies, n, k), dtype=torch.int8)
        scales = torch.rand(n).to(x.dtype)
        yield "torch_int8", lambda: [torch.ops.aten._weight_int8pack_mm(x, one, scales) for one in all_copies]


def onnx_passes(n: int, k: int, bits: int, x: torch.Tensor, copies: int, threads: int) -> Iterator[tuple[str, Pass]]:
    """One graph with a node for each copy."""
    try:
        import numpy as np
        import onnxruntime
        from onnx import TensorProto, helper, numpy_helper
    except ImportError:
        return
    rng = np.random.default_rng(0)
    levels = {"onnx_fp32": 0, "onnx_fast": 4}
    for name, level in levels.items():
        if level == 0 and bits == 8:
            continue  # without vectors: 40 times as long
        nodes, constants = [], []
        for i in range(copies):
            codes = rng.integers(0, 256, (n, k // GROUP, GROUP * bits // 8), dtype=np.uint8)
            scales = rng.random(n * k // GROUP, dtype=np.float32)
            constants += [numpy_helper.from_array(codes, f"codes{i}"), numpy_helper.from_array(scales, f"scales{i}")]
            sizes = {"K": k, "N": n, "bits": bits, "block_size": GROUP, "accuracy_level": level}
            inputs = ["x", f"codes{i}", f"scales{i}"]
            nodes.append(helper.make_node("MatMulNBits", inputs, [f"y{i}"], domain="com.microsoft", **sizes))
        floats = [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(x.shape))]
        results = [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, [len(x), n]) for i in range(copies)]
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(helper.make_graph(nodes, "copies", floats, results, constants), opset_imports=opsets, ir_version=10)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.add_session_config_entry("session.force_spinning_stop", "1")  # its threads would take the others' processors
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        binding = session.io_binding()
        binding.bind_cpu_input("x", x.float().numpy())
        for i in range(copies):
            binding.bind_ortvalue_output(f"y{i}", onnxruntime.OrtValue.ortvalue_from_numpy(np.empty((len(x), n), np.float32)))
        yield name, lambda session=session, binding=binding: session.run_with_iobinding(binding)


def timer(one: Pass, copies: int) -> Callable[[], list[float]]:
    """Microseconds of a copy, of the second of two passes."""

    def samples() -> list[float]:
        time.sleep(0.02)  # threads of the others go to sleep
        one()
        started = time.perf_counter()
        one()
        return [(time.perf_counter() - started) / copies * 1e6]

    return samples


def measured(n: int, k: int, bits: int, rows: int, total: int, rounds: int, threads: int) -> dict[str, Any]:
    copies = max(2, total // (n * k * bits // 8))
    weight, x = torch.randn(n, k), torch.randn(rows, k).bfloat16()
    own, nbytes = kvgen_pass(n, k, bits, weight, x, copies, threads)
    passes = {"kvgen": own, "read": read_pass(nbytes, copies, threads)}
    passes |= dict(torch_passes(n, k, bits, weight, x, copies)) | dict(onnx_passes(n, k, bits, x, copies, threads))
    wide = max(2, copies * bits // 16)
    timers = {name: timer(one, wide if name == "torch_bf16" else copies) for name, one in passes.items()}
    samples, _ = take_turns(timers, rounds)
    row: dict[str, Any] = {"n": n, "k": k, "bits": bits, "rows": rows, "bytes": nbytes, "copies": copies}
    row |= {f"{name}_us": median(taken) for name, taken in samples.items()}
    row["of_read"] = median(read / mine for read, mine in zip(samples["read"], samples["kvgen"], strict=True))
    return row


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--threads", type=int, default=torch.get_num_threads())
    command.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="NxK")
    command.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    given = command.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore", FallbackWarning)  # of defaults
    about, table = facts("cpu", TimingPolicy()), []
    for shape in given.shapes:
        n, k = map(int, shape.split("x"))
        kinds, total = SHAPES.get(shape, ((4, 8), LARGE))
        for bits in kinds:
            for rows in given.rows:
                table.append(measured(n, k, bits, rows, total, given.rounds, given.threads))
                told = "  ".join(f"{name.removesuffix('_us')} {value:.1f}" for name, value in table[-1].items() if name.endswith("_us"))
                print(f"{shape} int{bits} x {rows:2}: {told} µs; {table[-1]['of_read']:.2f} of the read", flush=True)
                write_rows("cpu_linear", table, about)


if __name__ == "__main__":
    main()
