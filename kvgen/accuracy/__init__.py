"""What a format costs in quality: errors of attention outputs, and perplexity of a small transformer, through the real kernels."""
