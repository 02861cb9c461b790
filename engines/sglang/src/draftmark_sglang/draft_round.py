"""Process-wide reference to the running `DraftSteps`, for the hook on SGLang's `select_top_k_tokens`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .draft_steps import DraftSteps


class ActiveRound:
    """Reference to the running draft steps. A process runs one draft model, one step at a time.

    Attributes:
        steps: the container that was created last or began a round last; None if draftmark runs no draft model.
    """

    steps: DraftSteps | None = None


ACTIVE_ROUND = ActiveRound()
