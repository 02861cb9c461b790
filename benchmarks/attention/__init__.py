"""Benchmark of one attention call: draftmark's CUDA plugins compared with other libraries, on one GPU."""
