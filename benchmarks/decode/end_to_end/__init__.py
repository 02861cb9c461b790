"""End-to-end decoding benchmarks on a GPU."""
