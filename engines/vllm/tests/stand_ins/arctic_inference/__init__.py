"""Stands in for a package that vLLM's suffix decoding asks for, and that has no build for a CPU."""
