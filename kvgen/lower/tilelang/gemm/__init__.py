"""Form "gemm": whole tiles of codes and probabilities, `T.gemm` between them. Short and slow: the readable reference."""
