"""Arguments of SGLang's attention calls that change what attention means: none may be dropped in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REASONS = {
    "q_rope": "MLA (a query in two parts) is not served",
    "k_rope": "MLA (a key in two parts) is not served",
    "idx_q": "an indexer's sparse attention is not served",
    "score_mod": "a score_mod is not served",
    "rel_bias": "a relative bias is not served",
}


def refuse(arguments: Mapping[str, Any], layer_id: int) -> None:
    """Raise for the first argument that is given.

    Raises:
        NotImplementedError: with the reason.
    """
    for name, value in arguments.items():
        if value is not None and value is not False:
            reason = REASONS.get(name, f"argument {name} of an attention call is not served")
            raise NotImplementedError(
                f"layer {layer_id}: {reason} by --attention-backend draftmark; use one of SGLang's own backends"
            )
