"""The compiler flags that back ends ask for beyond the toolchain's own."""

CPU = ("-fopenmp", "-Wno-psabi", "-fvisibility=hidden", "-fvisibility-inlines-hidden")
"""Only the exported functions are visible, so no vector crosses a library border, and modules share no inline variable: the linker would
merge those of all modules of a process.
"""
TILELANG = ("-diag-suppress=550",)
