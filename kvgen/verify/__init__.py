"""What kernels are compared with: the fp64 reference of quantization, cache, attention and matrices, and data to try them on."""
