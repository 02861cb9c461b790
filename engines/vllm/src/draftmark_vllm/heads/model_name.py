"""Names by which vLLM finds the model class of a converted head."""

from __future__ import annotations

ARCHITECTURE = "Eagle3DraftmarkHeadForCausalLM"
"""Architecture in config.json. vLLM keeps an EAGLE-3 drafter's name if it begins with Eagle3."""
PATH = "draftmark_vllm.heads.model:DraftmarkHeadForCausalLM"
