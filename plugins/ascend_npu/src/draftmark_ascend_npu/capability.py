"""What this installation of CANN has, asked of its libraries by symbol. Loads no Python package."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

RUNTIME = "libascendcl.so"
VALUE_FUNCTIONS = ("aclrtValueWait", "aclrtValueWrite")
"""What torch_npu makes external events of. Without them ``ExternalEvent.wait`` captures nothing before a first
record, and a replay runs with the lengths of another round."""
FUSED_V3, FUSED_V4 = "aclnnFusedInferAttentionScoreV3", "aclnnFusedInferAttentionScoreV4"
"""V3 is what npu_fused_infer_attention_score calls, V4 what npu_fused_infer_attention_score_v2 calls. CANN 9 says
that V3 is to be deprecated in December 2026."""


def has(library: str, *symbols: str) -> bool:
    """Whether a shared library is found and has every symbol."""
    found = _load(library)
    return found is not None and all(hasattr(found, symbol) for symbol in symbols)


def has_external_events() -> bool:
    """Whether the runtime waits for and writes words of device memory."""
    return has(RUNTIME, *VALUE_FUNCTIONS)


def has_operator(symbol: str) -> bool:
    """Whether any of the operator libraries has an aclnn function; those of CANN 8.5 and later are several."""
    return any(has(library, f"{symbol}GetWorkspaceSize") for library in operator_libraries())


def operator_libraries() -> Iterator[str]:
    """libopapi.so, and the parts that lie beside it in an installation of CANN 8.5 or later."""
    yield "libopapi.so"
    home = os.environ.get("ASCEND_HOME_PATH")
    for part in sorted(Path(home, "lib64").glob("libopapi_*.so")) if home else ():
        yield str(part)


@cache
def _load(library: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(library)
    except OSError:
        return None
