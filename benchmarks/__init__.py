"""Benchmarks and their records in `results/`. Run each from the repository's root with `python -m benchmarks.…`."""
