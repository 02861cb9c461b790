"""Rejection of arguments to SGLang's attention calls that change the result and that draftmark does not support."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REASONS = {
    "q_rope": "MLA (a query in two parts) is not supported",
    "k_rope": "MLA (a key in two parts) is not supported",
    "idx_q": "sparse attention with an indexer is not supported",
    "score_mod": "score_mod is not supported",
    "rel_bias": "a relative bias is not supported",
}


def refuse(arguments: Mapping[str, Any], layer_id: int) -> None:
    """Raise an error if SGLang's attention call has an optional argument that draftmark does not support.

    Args:
        arguments: the call's arguments that `forward_decode` and `forward_extend` do not name.

    Raises:
        NotImplementedError: an argument is neither None nor False. The error states why it is not supported.
    """
    for name, value in arguments.items():
        if value is not None and value is not False:
            reason = REASONS.get(name, f"argument {name} of an attention call is not supported")
            raise NotImplementedError(
                f"layer {layer_id}: {reason} by --attention-backend draftmark; use one of SGLang's own backends"
            )
