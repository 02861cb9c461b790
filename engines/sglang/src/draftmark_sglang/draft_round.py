"""The draft round under way in this process: whom the hook on `select_top_k_tokens` tells about parents."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .draft_steps import DraftSteps


class ActiveRound:
    """A process runs one draft model, and its steps one after the other.

    Attributes:
        steps: the container that was made last, or whose round began last; None where draftmark drafts nothing.
    """

    steps: DraftSteps | None = None


ACTIVE = ActiveRound()
