"""Decoding on a GPU, end to end."""
