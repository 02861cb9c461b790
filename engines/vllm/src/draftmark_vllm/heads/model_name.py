"""How vLLM finds the model class of a converted head."""

from __future__ import annotations

ARCHITECTURE = "Eagle3DraftmarkHeadForCausalLM"
"""In config.json; vLLM keeps the name of an EAGLE-3 drafter that begins so."""
PATH = "draftmark_vllm.heads.model:DraftmarkHeadForCausalLM"
