"""From a shared library to calls on torch tensors: loading, caches, plans, checks, launches. Nothing here compiles."""
