"""Sizes without torch: geometries, batches in integers, and what a batch needs of every buffer."""
