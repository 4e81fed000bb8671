"""Which spec each layer of a transformers model has: `kvgen.spec.layers` over the model's configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvgen.errors import UnsupportedError
from kvgen.spec import KernelSpec, layers
from kvgen.spec.layers import Format


def layer_specs(
    config: Any, spec: Format | Mapping[str, Format] | Sequence[Format], *, batch: int = 1, max_len: int = 4096
) -> list[KernelSpec]:
    """The spec of every layer of a model with this configuration (`model.config`), as `kvgen.spec.layers.layer_specs` makes them.

    The dtype of a format without one is the configuration's, and torch's default where it has none. Raises TypeError for something else
    than a configuration, and as that function does.
    """
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"config must be the model's configuration (model.config), not {type(config).__name__}")
    text = config if getattr(config, "is_encoder_decoder", False) else config.get_text_config(decoder=True)
    known = {**text.to_dict(), "model_type": text.model_type}  # to_dict has that of the class
    default = str(torch.get_default_dtype()).removeprefix("torch.")
    return layers.layer_specs(known, spec, batch=batch, max_len=max_len, dtype=default)


def refusal(reason: str) -> UnsupportedError:
    """The error for a call of a model that needs something else of its cache than causal self-attention."""
    return UnsupportedError("KvgenCache", reason, is_backend=False)
