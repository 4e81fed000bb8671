"""The CUDA back end: kernels of fragment-ordered blocks for SM80, SM89 and SM90, rendered over `templates/cuda/include`."""

from __future__ import annotations

from kvgen.lower.backend import Lowering
from kvgen.lower.cuda.backend import CudaBackend
from kvgen.lower.matrix import CUDA
from kvgen.spec import KernelSpec, MatrixSpec


def backend() -> Lowering[KernelSpec]:
    """Attention."""
    return CudaBackend()


def matrix() -> Lowering[MatrixSpec]:
    """Operations on a matrix."""
    return CUDA
