"""The draft rounds that are probed. No torch."""

from __future__ import annotations

CONTEXT, STEPS, LENGTHS = 40, 4, (30, 29, 29)
"""Three requests that are far from the context's end, so that nothing but a missing factor can be short."""
AT_THE_END, STEPS_AT_THE_END = (CONTEXT - 4,) * 3, 6
"""As far as SGLang lets a request come: it ends one with two tokens less than the context, of which a round has one
more to come, and one pending. Drafts are not counted."""
