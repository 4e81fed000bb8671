"""Hugging Face transformers: `model.generate(..., **KvgenCache(...).argument)` with `attn_implementation="kvgen"`.

Importing this package registers the attention function `kvgen` and its masks with transformers.
"""

from __future__ import annotations

from importlib.metadata import version

from kvgen.errors import ToolchainMissing
from kvgen.extras import install_line, require

require("kvgen.integrations.transformers", "transformers")
if not version("transformers").startswith("5."):
    raise ToolchainMissing(f"transformers {version('transformers')} is installed, and kvgen takes 5.x: {install_line('transformers')}")

from kvgen.integrations.transformers.attention import register  # noqa: E402
from kvgen.integrations.transformers.cache import CACHE_ARGUMENT, KvgenCache, layer_specs  # noqa: E402
from kvgen.integrations.transformers.checkpoints import load_quantized, save_quantized  # noqa: E402
from kvgen.integrations.transformers.loop import DecodeLoop  # noqa: E402
from kvgen.integrations.transformers.weights import quantize_weights, quantized_linears  # noqa: E402

register()

__all__ = [
    "CACHE_ARGUMENT",
    "DecodeLoop",
    "KvgenCache",
    "layer_specs",
    "load_quantized",
    "quantize_weights",
    "quantized_linears",
    "save_quantized",
]
