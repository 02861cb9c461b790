"""Inputs of the checks: geometries, forwards as token histories, draft trees, and rounds of CUDA graphs. No torch."""
