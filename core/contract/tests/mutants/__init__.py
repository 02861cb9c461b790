"""Mutants: copies of a correct backend with one defect each. The contract suite must fail on every mutant."""
