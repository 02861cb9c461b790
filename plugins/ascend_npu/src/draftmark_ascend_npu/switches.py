"""What may be changed from outside on a device that misbehaves: environment variables, read when they are needed.

DRAFTMARK_ASCEND_HOST_WAIT=1    wait on the host for the stream before every replay, as vllm-ascend and SGLang do. If
                                that makes a wrong result right, it was a race; if not, a wrong rule.
DRAFTMARK_ASCEND_FUSED=v1|v2    call npu_fused_infer_attention_score or …_v2, whatever the look-up says.
"""

from __future__ import annotations

import os

from draftmark import BackendError

HOST_WAIT = "DRAFTMARK_ASCEND_HOST_WAIT"
FUSED = "DRAFTMARK_ASCEND_FUSED"


def host_wait() -> bool:
    """Whether a replay waits on the host for what is on the stream."""
    return _choice(HOST_WAIT, ("0", "1")) == "1"


def fused() -> str | None:
    """``"v1"`` or ``"v2"``; None leaves it to the look-up."""
    return _choice(FUSED, ("v1", "v2"))


def _choice(name: str, allowed: tuple[str, ...]) -> str | None:
    value = os.environ.get(name) or None
    if value is not None and value not in allowed:
        raise BackendError(f"{name} is {value!r}, but it is {' or '.join(allowed)}; unset it for the default")
    return value
