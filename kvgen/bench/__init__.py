"""Compares a spec's kernel with torch, FlashInfer and ONNX Runtime in one run."""
