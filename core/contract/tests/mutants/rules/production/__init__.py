"""Mutants that the checks of `production` kill."""
