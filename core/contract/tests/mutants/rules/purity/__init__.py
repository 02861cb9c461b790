"""Mutants that the checks of `purity` kill."""
