"""Lets `draftmark judge` test vLLM's own attention backends. Imports vLLM only when the judge opens a backend."""

from .engine import ENGINE

__all__ = ["ENGINE"]
