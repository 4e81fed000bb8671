"""Which integrations can be used here, for `kvgen doctor`. Imports none of them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

from kvgen.errors import ToolchainMissing
from kvgen.extras import install_line, require

TRANSFORMERS = (5, 6)
"""The first major release that the integration takes, and the first that it does not; pyproject.toml says the same."""


def torch_ops() -> str:
    """Operators for torch.compile and CUDA graphs."""
    return f"kvgen.integrations.torch_ops, with torch {version('torch')}"


def transformers() -> str:
    """Caches for Hugging Face's models. Raises ToolchainMissing without a release that has them."""
    require("kvgen.integrations.transformers", "transformers")
    found, (first, beyond) = version("transformers"), TRANSFORMERS
    if not first <= int(found.split(".")[0]) < beyond:
        raise ToolchainMissing(f"transformers {found} is installed, and kvgen takes {first}.x: {install_line('transformers')}")
    return f'kvgen.integrations.transformers, attn_implementation="kvgen", with transformers {found}'


INTEGRATIONS: dict[str, Callable[[], str]] = {"torch.compile": torch_ops, "transformers": transformers}
"""What to say of each integration. They raise ToolchainMissing, with the reason."""
