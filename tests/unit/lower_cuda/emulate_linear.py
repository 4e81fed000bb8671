"""The CUDA kernels of linear layers, run on the CPU by the emulator."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from kvgen.lower.backend import get_backend
from kvgen.lower.linear import rows_of
from kvgen.lower.schedule import Schedule
from kvgen.runtime.linear import LinearVariant
from kvgen.spec import LinearSpec
from tests.unit.lower_cuda.emulate import library

EXPORTS = """
using namespace kvgen::linear;
extern "C" void call(bool backwards, void* const* tensors, const int64_t* n) {
  using T = Traits<Schedule>;
  const auto at = [&](int i) { return static_cast<uint8_t*>(tensors[i]); };
  const Arguments a{at(0), at(1), at(2), at(3), at(4), 2 * n[0], 2 * n[1], 2 * n[2], static_cast<int>(n[3])};
  emulator::backwards = backwards;
  if (shared_bytes<Schedule>() > sizeof emulator::shared) std::abort();
  checker::declare_constant(a.packed, T::Packed::kBytes);
  emulator::launch(dim3(T::kBlocks * T::kSplit), T::kThreads, [&] { linear_kernel<Schedule>(a); }, T::kSplit * T::kShare,
                   Schedule::kOverlap);
}
extern "C" void expand(bool backwards, const void* packed, void* out, int64_t stride) {
  emulator::backwards = backwards;
  checker::declare_constant(packed, Traits<Schedule>::Packed::kBytes);
  emulator::launch(dim3(Expand<Schedule>::kBlocks), Expand<Schedule>::kThreads, [&] {
    expand_kernel<Schedule>(static_cast<const uint8_t*>(packed), static_cast<uint8_t*>(out), 2 * stride);
  });
}
"""


class EmulatedLinear:
    """The module of one schedule. CTAs run in the order of their numbers, and against it at every other call."""

    set_threads = None

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._calls = 0

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
        """As a compiled module's."""
        if len(x) == 0:
            return
        self._calls += 1
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in (x, packed, bias, residual, out))
        strides = (x.stride(0), 0 if residual is None else residual.stride(0), out.stride(0))
        numbers = (ctypes.c_int64 * 4)(*strides, len(x))
        self._library.call(ctypes.c_bool(self._calls % 2 == 0), (ctypes.c_void_p * 5)(*pointers), numbers)

    def expand(self, packed: Tensor, out: Tensor) -> None:
        """As a compiled module's."""
        self._calls += 1
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (packed, out))
        self._library.expand(ctypes.c_bool(self._calls % 2 == 0), *pointers, ctypes.c_int64(out.stride(0)))


def compiled(spec: LinearSpec, schedule: Schedule, folder: Path, planted: Mapping[str, str] | None = None) -> Path:
    """The library of a schedule for SM90; `planted` as `library` takes it."""
    text = get_backend("cuda").lower(spec, schedule, "sm90").text
    text = text.replace("expand_module", "expand").replace("linear/module", "linear/kernel").partition("using Module")[0]
    kernel = re.sub(r".*\bkType\b.*\n", "", text) + "}  // namespace\n"  # what only a module's call needs
    return library(kernel + EXPORTS, folder, planted)


def emulated(spec: LinearSpec, schedule: Schedule, path: Path) -> LinearVariant:
    """A compiled library as a variant that is called on tensors of the CPU, with weights packed as for GPUs."""
    variant = LinearVariant(spec, EmulatedLinear(path), "sm90", rows_of(schedule.launch))  # type: ignore[arg-type]
    variant.device_type = "cpu"
    return variant
