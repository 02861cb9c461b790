"""Ways of the reference to take rejected rows out of a recurrent state."""

from __future__ import annotations

from enum import StrEnum


class Rollback(StrEnum):
    """Way of recurrent layers to take rejected rows back."""

    SNAPSHOTS = "snapshots"
    """Keep the state after each row; the commit copies the last accepted row's."""
    REPLAY = "replay"
    """Keep the inputs of each row; the commit runs the accepted rows again."""
