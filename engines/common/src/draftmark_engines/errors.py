"""`EngineError`, the only error class of the adapters. Adapters raise it before an engine loads a model."""

from __future__ import annotations

from draftmark import DraftmarkError


class EngineError(DraftmarkError):
    """Error for an engine's needs that draftmark cannot serve. One sentence: thing, value, limit and remedy."""
