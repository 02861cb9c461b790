"""Functions that open the harness of a subject: a backend, or a layer of an engine.

The module of a harness registers it here. So a subject needs no harness, and one check runs on every kind of subject.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any


@singledispatch
def open_harness(subject: object, geometry: Any, num_pages: int) -> Any:
    """Open a subject for a check: with its attention layer, or with its layer with recurrent state.

    Args:
        num_pages: pages or slots of the pool, one null page included.
    """
    raise TypeError(f"no harness opens {type(subject).__name__}; import the module of its harness")


@singledispatch
def open_graphs(harness: object) -> Any:
    """Return a harness that captures and replays graphs of the subject that this harness has opened."""
    raise TypeError(f"no harness captures graphs of {type(harness).__name__}; import the module of its graph harness")
