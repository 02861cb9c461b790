"""Faster execution of the Triton kernels in Triton's interpreter, for CPU tensors."""
