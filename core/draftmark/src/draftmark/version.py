"""Version of the distribution and of the backend contract; each number has this one home."""

__version__ = "0.1.0"

CONTRACT_MAJOR = 1
"""A backend written for another major cannot be loaded; the entry-point group carries it."""
CONTRACT_MINOR = 4
"""Checks newer than a backend's own minor are reported as upcoming, not as failures."""
ENTRY_POINT_GROUP = f"draftmark.backends.v{CONTRACT_MAJOR}"
