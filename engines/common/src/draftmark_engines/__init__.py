"""Code that draftmark's adapters for LLM engines share. Imports neither torch nor an engine.

`versions` lists supported releases of an engine, `choice` selects a backend, `geometry` builds a `Geometry` from an
engine's numbers, and `hooks` warns of hooks that a release lacks. If an engine's request cannot be served, the code
raises an `EngineError` of one sentence.
"""

from .choice import choose
from .errors import EngineError
from .geometry import EngineLimits, geometry_for, window_left
from .hooks import warn_missing_hook
from .versions import SupportedVersions

__all__ = [
    "EngineError",
    "EngineLimits",
    "SupportedVersions",
    "choose",
    "geometry_for",
    "warn_missing_hook",
    "window_left",
]
