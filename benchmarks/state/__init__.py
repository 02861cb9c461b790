"""Benchmark of layers with recurrent state: decode, verify with commit, and prompts, next to other libraries."""
