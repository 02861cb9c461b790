"""Mutants that the checks of `latent` kill."""
