"""Kernels inside other frameworks."""
