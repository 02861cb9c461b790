"""vLLM's own attention backends as targets of `draftmark judge`. Imports no vLLM before a target is opened."""

from .engine import ENGINE

__all__ = ["ENGINE"]
