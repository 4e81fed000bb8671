"""The CUDA back end: kernels of fragment-ordered blocks for SM80, SM89 and SM90, rendered over `templates/cuda/include`."""

from __future__ import annotations

from kvgen.lower.base import Backend
from kvgen.lower.cuda.backend import CudaBackend


def backend() -> Backend:
    """The back end."""
    return CudaBackend()
