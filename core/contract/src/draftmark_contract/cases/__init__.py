"""Inputs of the checks: geometries, forwards as token histories, draft trees, rounds of graphs. No torch."""
