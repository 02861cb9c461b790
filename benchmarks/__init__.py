"""Measured runs, and what they gave (`results/`); each is run from the root by `python -m benchmarks.…`."""
