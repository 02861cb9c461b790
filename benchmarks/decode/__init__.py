"""Benchmarks and checks of whole decoding loops: speed, equality of texts, and the cost of parts."""
