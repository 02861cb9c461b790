"""Mutants that the checks of `chosen` kill."""
