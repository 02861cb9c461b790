"""Mutants that the checks of `state` kill."""
