"""Mutants of the classes A to K by a fifth author, who had not read the checks when the mutants were written."""
