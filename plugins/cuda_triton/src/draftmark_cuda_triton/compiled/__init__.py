"""Compiled kernels: a store on disk, compilation in parallel before the first request, and shipped machine code."""
