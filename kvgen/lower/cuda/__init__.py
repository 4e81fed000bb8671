"""The CUDA back end: kernels of fragment-ordered blocks for SM80, SM89 and SM90, rendered over `templates/cuda/include`."""

from kvgen.lower.cuda.backend import CudaBackend as backend  # noqa: N813
from kvgen.lower.matrix import CUDA as matrix  # noqa: N811

__all__ = ["backend", "matrix"]
