"""`EngineError`, the only error class of the adapters. Adapters raise it before an engine loads a model."""

from __future__ import annotations

from draftmark import DraftmarkError


class EngineError(DraftmarkError):
    """An engine needs something that cannot be served. One sentence: the thing, its value, the limit and the remedy."""
