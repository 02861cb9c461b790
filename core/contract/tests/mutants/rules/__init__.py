"""Mutants by the rule that kills them."""
