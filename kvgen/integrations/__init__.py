"""Kernels inside other frameworks: `torch_ops` for torch.compile and graph capture, `transformers` for Hugging Face's models."""
