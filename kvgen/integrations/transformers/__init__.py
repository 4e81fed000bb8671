"""Hugging Face transformers: `model.generate(..., **KvgenCache(...).argument)` with `attn_implementation="kvgen"`.

Importing this package registers the attention function `kvgen` and its masks with transformers.
"""

from __future__ import annotations

from kvgen.extras import require

require("kvgen.integrations.transformers", "transformers")

from kvgen.integrations.transformers.attention import register  # noqa: E402
from kvgen.integrations.transformers.cache import CACHE_ARGUMENT, KvgenCache, layer_specs  # noqa: E402
from kvgen.integrations.transformers.loop import DecodeLoop  # noqa: E402

register()

__all__ = ["CACHE_ARGUMENT", "DecodeLoop", "KvgenCache", "layer_specs"]
