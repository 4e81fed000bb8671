"""The CUDA back end: kernels of fragment-ordered blocks for SM80, SM89 and SM90, rendered over `templates/cuda/include`."""

from kvgen.lower import linear, matrix
from kvgen.lower.cuda.backend import CudaBackend as backend  # noqa: N813
from kvgen.spec import LinearSpec, MatrixSpec

__all__ = ["backend", "operations"]

operations = {MatrixSpec: matrix.CUDA, LinearSpec: linear.CUDA}
"""Lowerings of other operations than attention, by the kind of their specs."""
