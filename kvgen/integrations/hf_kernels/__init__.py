"""`kvgen export --format hf-kernels`: a kernel as a folder that Hugging Face `kernels` loads, without kvgen."""
