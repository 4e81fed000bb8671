"""Kernels inside other frameworks: `torch_ops` for torch.compile and graph capture."""
