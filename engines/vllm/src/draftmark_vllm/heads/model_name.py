"""Architecture name and import path of a converted head's model class, for vLLM's model registry."""

from __future__ import annotations

ARCHITECTURE = "Eagle3DraftmarkHeadForCausalLM"
"""Architecture in config.json. vLLM keeps an EAGLE-3 drafter's name if it begins with Eagle3."""
PATH = "draftmark_vllm.heads.model:DraftmarkHeadForCausalLM"
