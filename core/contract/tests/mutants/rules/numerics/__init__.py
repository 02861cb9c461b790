"""Mutants that the checks of `numerics` kill."""
