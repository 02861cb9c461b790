"""Helpers that the tests of several distributions import. This package has no wheel.

pytest finds it by `pythonpath` in the repository's pyproject.toml, so every environment that runs tests has it.
"""
