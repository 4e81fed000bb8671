"""Compares a spec's kernel with torch and FlashInfer in one run."""
