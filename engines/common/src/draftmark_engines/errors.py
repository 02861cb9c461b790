"""The one error of an adapter, raised before an engine loads a model."""

from __future__ import annotations

from draftmark import DraftmarkError


class EngineError(DraftmarkError):
    """An engine asks for what cannot be served: one sentence with what, got, limit and remedy."""
