"""Judges a drafter: a target that drafts for itself must lose no greedy draft, and a lost one is explained.

    lost = judge_drafter(model, EngineConfig(), prompts, new_tokens=32, topk=2)
    print(*lost, sep="\\n")

Replace `DraftAttention` by the way in which an engine's drafter reads KV. Each lost draft then names the first layer at
which the drafter reads another position, scale, window or KV than its target.
"""

from .attention import DraftAttention, DraftLayer
from .lost import LostDraft, judge_drafter
from .self_drafts import SelfDrafts

__all__ = ["DraftAttention", "DraftLayer", "LostDraft", "SelfDrafts", "judge_drafter"]
