"""Mutants that the checks of `graphs` kill."""
