"""Checks what the installed CANN supports, by the symbols of its shared libraries. Imports no Python package."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

RUNTIME = "libascendcl.so"
VALUE_FUNCTIONS = ("aclrtValueWait", "aclrtValueWrite")
"""Functions that torch_npu's external events need. Without them ``ExternalEvent.wait`` captures nothing before a first
record, and a replay runs with the lengths of another round."""
FUSED_V3, FUSED_V4 = "aclnnFusedInferAttentionScoreV3", "aclnnFusedInferAttentionScoreV4"
"""npu_fused_infer_attention_score calls V3, and npu_fused_infer_attention_score_v2 calls V4. CANN 9 announces that V3
is deprecated in December 2026."""


def has(library: str, *symbols: str) -> bool:
    """Return true if a shared library is found and has every symbol."""
    found = _load(library)
    return found is not None and all(hasattr(found, symbol) for symbol in symbols)


def has_external_events() -> bool:
    """Return true if the runtime has the functions that external events need (wait for and write device memory)."""
    return has(RUNTIME, *VALUE_FUNCTIONS)


def has_operator(symbol: str) -> bool:
    """Return true if one of CANN's operator libraries has an aclnn function. CANN 8.5 and later have several."""
    return any(has(library, f"{symbol}GetWorkspaceSize") for library in operator_libraries())


def operator_libraries() -> Iterator[str]:
    """Yield libopapi.so, and the further operator libraries of CANN 8.5 or later."""
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
