"""Sizes without torch: geometries, batches as integers, and the size that a batch needs in every buffer."""
