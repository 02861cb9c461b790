"""What draftmark's adapters for LLM engines share. No torch, and no engine, is imported.

`versions` says which releases of an engine are served, `choice` which backend serves, `geometry` turns an engine's
numbers into a `Geometry`. Every refusal is an `EngineError` of one sentence.
"""

from .choice import choose
from .errors import EngineError
from .geometry import EngineLimits, geometry_for, window_left
from .versions import SupportedVersions

__all__ = ["EngineError", "EngineLimits", "SupportedVersions", "choose", "geometry_for", "window_left"]
