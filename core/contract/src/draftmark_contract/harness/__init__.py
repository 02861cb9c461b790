"""Harnesses that run a case on a backend and compare the result with the oracle: eager, captured and late forwards."""
