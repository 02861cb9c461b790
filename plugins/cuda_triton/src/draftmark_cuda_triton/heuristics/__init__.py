"""Kernel configurations: which kernel runs a batch, with which tile, and into how many splits."""
