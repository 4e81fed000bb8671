"""torch's types for the names that specs use."""

from __future__ import annotations

import torch

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def torch_dtype(name: str) -> torch.dtype:
    """torch's type for a spec's `dtype`."""
    return DTYPES[name]
