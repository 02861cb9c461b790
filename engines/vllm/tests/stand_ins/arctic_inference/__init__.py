"""Stand-in for a package that vLLM's suffix decoding imports. The package has no build for a CPU."""
