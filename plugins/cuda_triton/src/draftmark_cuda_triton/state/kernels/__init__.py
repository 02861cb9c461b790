"""Triton kernels of layers with recurrent state. Every file also runs on the CPU, under TRITON_INTERPRET=1."""
