"""Computes, without torch, the size that a batch needs in every buffer, from geometries and batches as integers."""
