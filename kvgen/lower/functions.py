"""The functions of a compiled module: what back ends export and the runtime calls."""

FUNCTIONS = ("advance", "attend", "crop", "decode", "pack", "plan", "plan_size", "split_tokens", "unpack", "workspace_bytes")
"""`docs/abi.md` lists their arguments."""
MATRIX_FUNCTIONS = ("dequantize", "quantize", "scales")
"""Functions of a module of operations on a matrix."""
