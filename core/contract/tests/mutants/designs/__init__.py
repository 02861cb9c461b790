"""Correct backends and parts of backends that mutants change, and factories of mutants."""
