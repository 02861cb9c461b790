"""Versions of the distribution and of the backend contract."""

__version__ = "0.1.0"

CONTRACT_MAJOR = 1
"""Major version of the contract. A backend for another major cannot be loaded; the entry-point group contains it."""
CONTRACT_MINOR = 5
"""Minor version of the contract. Checks newer than a backend's minor are reported as upcoming, not as failures."""
ENTRY_POINT_GROUP = f"draftmark.backends.v{CONTRACT_MAJOR}"
