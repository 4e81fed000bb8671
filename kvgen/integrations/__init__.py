"""Kernels inside other frameworks. Which of them can be used here, for `kvgen doctor`; this module imports none of them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

from kvgen.errors import ToolchainMissing
from kvgen.extras import install_line, require

TRANSFORMERS = (5, 6)
"""The first major release that the integration takes, and the first that it does not; pyproject.toml says the same."""


def usable_transformers() -> str:
    """What to say of the integration. Raises ToolchainMissing without a release that it takes."""
    require("kvgen.integrations.transformers", "transformers")
    found, (first, beyond) = version("transformers"), TRANSFORMERS
    if not first <= int(found.split(".")[0]) < beyond:
        raise ToolchainMissing(f"transformers {found} is installed, and kvgen takes {first}.x: {install_line('transformers')}")
    return f'kvgen.integrations.transformers, attn_implementation="kvgen", with transformers {found}'


INTEGRATIONS: dict[str, Callable[[], str]] = {
    "torch.compile": lambda: f"kvgen.integrations.torch_ops, with torch {version('torch')}",
    "transformers": usable_transformers,
}
"""What to say of each integration."""
