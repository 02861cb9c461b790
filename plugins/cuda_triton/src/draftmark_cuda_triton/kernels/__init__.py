"""The plugin's Triton kernels, one file each. Every file runs on a GPU and, under TRITON_INTERPRET=1, on the CPU."""
