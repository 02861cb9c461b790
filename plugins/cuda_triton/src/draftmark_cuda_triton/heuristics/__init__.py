"""Heuristics that select a batch's kernel, its tile shape and its number of KV splits."""
