"""Packages that not every installation has, and the line that installs them."""

from __future__ import annotations

from importlib.util import find_spec

from kvgen.errors import ToolchainMissing

EXTRAS = {
    "tilelang": ("tilelang",),
    "report": ("matplotlib",),
    "checkpoints": ("safetensors",),
    "postgresql": ("psycopg",),
    "transformers": ("transformers",),
    "accuracy": ("accelerate", "chitchat_dataset", "gguf", "transformers"),
    "vllm": ("vllm",),
}
"""Packages by the extra of kvgen that brings them; pyproject.toml has their versions."""


def install_line(package: str) -> str:
    """What to type to get a package of an extra."""
    extra = next(name for name, packages in EXTRAS.items() if package in packages)
    return f"pip install 'kvgen[{extra}]'"


def require(purpose: str, *packages: str) -> None:
    """Raise ToolchainMissing, with the line to type, where a package is not installed. Imports none of them."""
    absent = [package for package in packages if find_spec(package) is None]
    if absent:
        raise ToolchainMissing(f"{purpose} needs {' and '.join(absent)}: {install_line(absent[0])}")
