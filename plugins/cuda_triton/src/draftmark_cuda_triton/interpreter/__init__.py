"""A faster interpreter for the Triton kernels on CPU tensors."""
