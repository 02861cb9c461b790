"""Environment variables that help to find a fault on a device. They are read at each use.

DRAFTMARK_ASCEND_HOST_WAIT=1    wait on the host for the stream before every replay, as vllm-ascend and SGLang do. If
                                a wrong result becomes right, the cause was a race, otherwise a wrong rule.
DRAFTMARK_ASCEND_FUSED=v1|v2    call npu_fused_infer_attention_score (v1) or …_v2, without a look at CANN's libraries.
"""

from __future__ import annotations

import os

from draftmark import BackendError

HOST_WAIT = "DRAFTMARK_ASCEND_HOST_WAIT"
FUSED = "DRAFTMARK_ASCEND_FUSED"


def host_wait() -> bool:
    """Return true if the host must wait for the stream before each replay."""
    return _choice(HOST_WAIT, ("0", "1")) == "1"


def fused() -> str | None:
    """Return ``"v1"`` or ``"v2"``, or None for the choice by CANN's libraries."""
    return _choice(FUSED, ("v1", "v2"))


def _choice(name: str, allowed: tuple[str, ...]) -> str | None:
    value = os.environ.get(name) or None
    if value is not None and value not in allowed:
        raise BackendError(f"{name} is {value!r}, but it must be {' or '.join(allowed)}; unset it for the default")
    return value
