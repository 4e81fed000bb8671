"""The slow truth (torch, fp64): quantization, packed layout, cache, attention, and the data to try them on."""
