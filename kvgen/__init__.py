"""kvgen: from a description of a quantized KV cache to tuned, verified, registered attention kernels.

Names are loaded on first use, so that `import kvgen` costs nothing; `get_kernel` needs torch, `load_spec` does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvgen.api import FallbackWarning, build, get_kernel, get_linear_kernel, get_matrix_kernel
    from kvgen.api.kernel import Kernel, LinearKernel, MatrixKernel
    from kvgen.errors import KvgenError, SpecError, UnsupportedError
    from kvgen.format.calibration import calibrated_scales
    from kvgen.integrations.checkpoint import load_scales
    from kvgen.integrations.rotary import rotary
    from kvgen.spec import KernelSpec, LinearSpec, MatrixSpec, load_any_spec, load_spec

__version__ = "0.1.0"

_HOMES = {
    "FallbackWarning": "kvgen.api",
    "Kernel": "kvgen.api.kernel",
    "KernelSpec": "kvgen.spec",
    "KvgenError": "kvgen.errors",
    "LinearKernel": "kvgen.api.kernel",
    "LinearSpec": "kvgen.spec",
    "MatrixKernel": "kvgen.api.kernel",
    "MatrixSpec": "kvgen.spec",
    "SpecError": "kvgen.errors",
    "UnsupportedError": "kvgen.errors",
    "build": "kvgen.api",
    "calibrated_scales": "kvgen.format.calibration",
    "get_kernel": "kvgen.api",
    "get_linear_kernel": "kvgen.api",
    "get_matrix_kernel": "kvgen.api",
    "load_any_spec": "kvgen.spec",
    "load_scales": "kvgen.integrations.checkpoint",
    "load_spec": "kvgen.spec",
    "rotary": "kvgen.integrations.rotary",
}

__all__ = [
    "FallbackWarning",
    "Kernel",
    "KernelSpec",
    "KvgenError",
    "LinearKernel",
    "LinearSpec",
    "MatrixKernel",
    "MatrixSpec",
    "SpecError",
    "UnsupportedError",
    "__version__",
    "build",
    "calibrated_scales",
    "get_kernel",
    "get_linear_kernel",
    "get_matrix_kernel",
    "load_any_spec",
    "load_scales",
    "load_spec",
    "rotary",
]


def __getattr__(name: str) -> Any:
    """Import a name at its first use."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvgen' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
