"""The CUDA packer and unpacker, run on the CPU: their headers' own text over an emulation of what they use of CUDA."""

from __future__ import annotations

import atexit
import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from kvgen._resources import templates
from kvgen.format.constants import codec_headers, constants
from kvgen.format.layout import PackedLayout
from kvgen.format.residual import ResidualRows
from kvgen.toolchain.compilers import find_gxx
from tests.unit.lower_cuda import race_checks

LAUNCH = re.compile(r"([\w:]+(?:<[^;<>]*>)?)<<<([^;]*?), ([\w:]+), 0, stream>>>\((.*?)\);", re.DOTALL)
DYNAMIC = re.compile(r"extern __shared__ __align__\(\d+\) uint8_t memory\[\];")
HERE = race_checks.HERE
FLAGS = (
    "-std=c++20",
    "-fno-gnu-unique",  # other emulators in this process have variables of the same names
    "-fPIC",
    "-w",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-march=native",
    f"-I{HERE}",
)

EXPORTS = """
#include "kvgen/pack/pack.cuh"
#include "kvgen/pack/unpack.cuh"
{headers}
using namespace kvgen;
{constants}
using Format_ = Constants;
extern "C" int call(bool packing, bool backwards, void* const* tensors, const int64_t* numbers) {{
  emulator::backwards = backwards;
  CacheArgs cache;
  cache.packed = static_cast<uint8_t*>(tensors[0]);
  cache.k_residual = tensors[1], cache.v_residual = tensors[2];
  cache.lengths = static_cast<int*>(tensors[3]);
  cache.block_table = static_cast<const int*>(tensors[4]);
  cache.outer_stride_bytes = numbers[0], cache.head_stride_bytes = numbers[1];
  cache.table_stride = numbers[2], cache.page_blocks = numbers[3], cache.batch = numbers[4], cache.kv_heads = numbers[5];
  const Rows k{{tensors[5], numbers[7], numbers[8], numbers[9]}}, v{{tensors[6], numbers[10], numbers[11], numbers[12]}};
  cache.blocks = numbers[13], cache.slots = numbers[14], cache.residual_slots = static_cast<const int*>(tensors[8]);
  const int tokens = numbers[6];
  int overflow = 0;
  if (packing) {{
    PackArgs args;
    args.cache = cache, args.k = k, args.v = v, args.tokens = tokens, args.new_lengths = static_cast<const int*>(tensors[7]);
    args.limit = INT32_MAX, args.overflow = &overflow, args.scales = static_cast<const float*>(tensors[9]);
    args.starts = static_cast<const int*>(tensors[10]);
    launch_pack<Format_>(args, nullptr);
  }} else {{
    UnpackArgs args;
    args.cache = cache, args.k = k, args.v = v, args.tokens = tokens, args.scales = static_cast<const float*>(tensors[9]);
    args.starts = static_cast<const int*>(tensors[10]);
    launch_unpack<Format_>(args, nullptr);
  }}
  return overflow;
}}
template <class Format>
void write_slots(const WriteArgs& args) {{
  if constexpr (Format::ResidualRows::kArrival) launch_write<Format>(args, nullptr);
}}
extern "C" void write_tokens(bool backwards, void* const* tensors, const int64_t* numbers) {{
  emulator::backwards = backwards;
  WriteArgs args;
  args.packed = static_cast<uint8_t*>(tensors[0]), args.slots = static_cast<const int64_t*>(tensors[3]);
  args.outer_stride_bytes = numbers[0], args.head_stride_bytes = numbers[1];
  args.k = {{tensors[1], 0, numbers[2], numbers[3]}}, args.v = {{tensors[2], 0, numbers[4], numbers[5]}};
  args.tokens = numbers[6], args.kv_heads = numbers[7], args.blocks = numbers[8], args.places = numbers[9];
  args.scales = static_cast<const float*>(tensors[4]);
  write_slots<Format_>(args);
}}
"""


@dataclass
class Cache:
    """Tensors of a cache, shaped as in docs/abi.md, on the CPU."""

    packed: torch.Tensor
    k_residual: torch.Tensor
    v_residual: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor | None = None
    residual_slots: torch.Tensor | None = None
    scales: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor | None]:
        """In the order of the calls."""
        return [self.packed, self.k_residual, self.v_residual, self.lengths, self.block_table]


class Emulated:
    """pack and unpack of one format; in contiguous caches the blocks take `places` in turn, or (0) each has its own."""

    def __init__(self, layout: PackedLayout, dtype: torch.dtype, folder: Path, rows: ResidualRows | None = None, places: int = 0) -> None:
        """`rows` says which tokens are unquantized; where None, those that do not fill a block."""
        self._variant = layout, dtype, rows or ResidualRows(layout.tokens, 0, 0, 0, 1), places
        self._folder = folder
        self._libraries: dict[bool, ctypes.CDLL] = {}

    def library(self, paged: bool) -> ctypes.CDLL:
        """The functions for a paged or a contiguous cache."""
        if paged not in self._libraries:
            self._libraries[paged] = ctypes.CDLL(str(_compile(*self._variant, self._folder / f"paged{paged:d}", paged)))
        return self._libraries[paged]

    def pack(
        self,
        cache: Cache,
        k: torch.Tensor,
        v: torch.Tensor,
        new_lengths: torch.Tensor,
        backwards: bool = False,
        starts: torch.Tensor | None = None,
    ) -> bool:
        """Append; CTAs run in the order of their numbers or `backwards`. With `starts`, k and v are [tokens, kv_heads, head_dim]. Returns
        the overflow flag.
        """
        if starts is not None:
            k, v = (x.as_strided((1, *x.shape), (0, *x.stride())) for x in (k, v))
        return self._call(True, backwards, cache, k, v, new_lengths, starts)

    def write(self, cache: Cache, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, backwards: bool = False) -> None:
        """Tokens k, v [tokens, kv_heads, head_dim] to their slots."""
        outer, heads, blocks, _ = cache.packed.shape
        numbers = [*cache.packed.stride()[:2], *k.stride()[:2], *v.stride()[:2], len(slots), heads, blocks]
        numbers.append(outer * blocks * self._variant[0].tokens)
        pointers = [None if x is None else x.data_ptr() for x in (cache.packed, k, v, slots, cache.scales)]
        self.library(cache.block_table is not None).write_tokens(
            ctypes.c_bool(backwards), (ctypes.c_void_p * len(pointers))(*pointers), (ctypes.c_int64 * len(numbers))(*numbers)
        )

    def unpack(self, cache: Cache, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor | None = None) -> None:
        """Dequantize into k and v [batch, tokens, kv_heads, head_dim], or, with `starts`, [tokens, kv_heads, head_dim]."""
        if starts is not None:
            k, v = (x.as_strided((1, *x.shape), (0, *x.stride())) for x in (k, v))
        self._call(False, False, cache, k, v, None, starts)

    def _call(
        self,
        packing: bool,
        backwards: bool,
        cache: Cache,
        k: torch.Tensor,
        v: torch.Tensor,
        new: torch.Tensor | None,
        starts: torch.Tensor | None = None,
    ) -> bool:
        table = cache.block_table
        page_blocks = 0 if table is None else cache.packed.shape[2]
        numbers = [
            *cache.packed.stride()[:2],
            0 if table is None else table.stride(0),
            page_blocks,
            len(cache.lengths),
            cache.k_residual.shape[1],
        ]
        blocks = cache.packed.shape[2] if table is None else table.shape[1] * page_blocks
        numbers += [k.shape[1], *k.stride()[:3], *v.stride()[:3], blocks, len(cache.k_residual)]
        pointers = [None if t is None else t.data_ptr() for t in [*cache.tensors(), k, v, new, cache.residual_slots, cache.scales, starts]]
        overflow = self.library(table is not None).call(
            ctypes.c_bool(packing),
            ctypes.c_bool(backwards),
            (ctypes.c_void_p * len(pointers))(*pointers),
            (ctypes.c_int64 * len(numbers))(*numbers),
        )
        return bool(overflow)


def part_of_wider(table: torch.Tensor) -> torch.Tensor:
    """The same block table as the first columns of a wider one, whose other columns are the page of the first sequence's first block."""
    wide = torch.full((table.shape[0], 2 * table.shape[1] + 1), int(table[0, 0]), dtype=torch.int32)
    wide[:, : table.shape[1]] = table
    return wide[:, : table.shape[1]]


def _compile(layout: PackedLayout, dtype: torch.dtype, rows: ResidualRows, places: int, folder: Path, paged: bool) -> Path:
    name = "float16" if dtype == torch.float16 else "bfloat16"
    struct = constants(layout, rows, name, page_blocks=int(paged), window_places=0 if paged else places)
    folder.mkdir(parents=True, exist_ok=True)
    headers = "".join(f'#include "kvgen/codec/{header}.cuh"\n' for header in codec_headers(layout))
    return library(EXPORTS.format(headers=headers, constants=struct), folder)


def library(text: str, folder: Path, planted: Mapping[str, str] | None = None) -> Path:
    """Compile a text over kvgen's headers, in which launches and dynamic shared memory are the emulator's, as are headers of instructions.
    `planted`: other texts of headers, by their paths.
    """
    for include in (templates() / "cuda" / "include", templates() / "common" / "include"):
        for header in (include / "kvgen").rglob("*.*"):
            place = folder / header.relative_to(include)
            name = str(header.relative_to(include))
            if (HERE / name).exists() or header.suffix not in (".cuh", ".hpp"):
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            text_ = DYNAMIC.sub("uint8_t* memory = emulator::shared;", (planted or {}).get(name) or header.read_text())
            place.write_text(LAUNCH.sub(r"emulator::launch(\2, \3, [&] { \1(\4); });", text_))
    source, output = folder / "emulated.cpp", folder / race_checks.LIBRARY
    source.write_text(text)
    if race_checks.CHECKED.get():
        race_checks.build([*FLAGS, "-include", str(HERE / "cuda_fp16.h"), f"-I{folder}", str(source)], output)
    else:
        command = [str(find_gxx().path), "-O1", "-shared", *FLAGS, "-include", str(_precompiled()), f"-I{folder}", str(source)]
        subprocess.run([*command, "-o", str(output)], check=True)
    return output


@cache
def _precompiled() -> Path:
    """A header that includes the emulator's; g++ finds it precompiled beside it, which saves a second of every compilation."""
    folder = Path(tempfile.mkdtemp(prefix="emulator-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    header = folder / "emulator.hpp"
    header.write_text(f'#include "{HERE / "cuda_fp16.h"}"\n')
    subprocess.run([str(find_gxx().path), "-O1", *FLAGS, "-x", "c++-header", str(header), "-o", f"{header}.gch"], check=True)
    return header
