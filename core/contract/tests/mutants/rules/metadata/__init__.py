"""Mutants that the checks of `metadata` kill."""
