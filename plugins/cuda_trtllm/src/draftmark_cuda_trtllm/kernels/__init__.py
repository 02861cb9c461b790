"""Triton kernels of this plugin. Every file runs on a GPU and, under TRITON_INTERPRET=1, on the CPU."""
