"""Mutants: correct backends, broken in one place each, that the contract suite must tell from the correct ones."""
