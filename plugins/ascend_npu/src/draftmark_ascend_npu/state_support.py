"""Reasons for which the plugin refuses layers with recurrent state. Reads only integers and names.

Source: torch_npu 2.13's own page of npu_recurrent_gated_delta_rule (A2 and A3), and its page of
npu_fused_causal_conv1d. The operator reads the rows of a request in order. Row i reads and writes
``state[ssm_state_indices[i]]``, so a verify needs a state for each row.
"""

from __future__ import annotations

from draftmark import Gate, Mode, Recurrence, StateGeometry

OPERATOR = "npu_recurrent_gated_delta_rule"
DTYPE = "bfloat16"
"""Dtype of q, k, v, β and the states of the operator. Only the decay is float32."""
MAX_ROWS = 8
"""Most rows of one request in a call."""
MAX_HEADS, MAX_DIM = 256, 256


def state_reasons(geometry: StateGeometry) -> list[str]:
    """Return every reason for which layers with this state are refused; at least one."""
    s = geometry.state
    if s.recurrence is not Recurrence.DELTA:
        return [
            f"recurrence {s.recurrence.value} is not served on an NPU: torch_npu documents an operator of the gated "
            "delta rule only"
        ]
    rows = f"β as float32 is not served: {OPERATOR} takes {DTYPE}, and that rounding exceeds the contract's bounds"
    reasons = [rows]
    for name in ("dtype", "state_dtype"):
        if getattr(s, name) != DTYPE:
            reasons.append(f"{name} {getattr(s, name)} is not served: {OPERATOR} takes {DTYPE}")
    if s.gate is not Gate.HEAD:
        reasons.append(f"gate {s.gate.value} is not served: {OPERATOR} has one decay per head, and gk must be None")
    if s.conv_kernel:
        reasons.append(
            f"conv_kernel {s.conv_kernel} is not served: npu_fused_causal_conv1d is for the Ascend 950, not A2 or A3"
        )
    if max(s.num_heads, s.num_key_heads) > MAX_HEADS or max(s.key_dim, s.value_dim) > MAX_DIM:
        reasons.append(
            f"{s.num_heads} heads of {s.value_dim} x {s.key_dim} are not served: {OPERATOR} takes up to {MAX_HEADS} "
            f"heads, and {MAX_DIM} elements in each direction"
        )
    if Mode.VERIFY in geometry.modes:
        reasons += _verify_reasons(geometry)
    return reasons


def _verify_reasons(geometry: StateGeometry) -> list[str]:
    reasons = []
    if geometry.draft.topk > 1:
        reasons.append(
            f"topk {geometry.draft.topk} is not served with recurrent state: {OPERATOR} reads rows in order; use topk 1"
        )
    if geometry.draft.num_draft_tokens > MAX_ROWS:
        reasons.append(
            f"num_draft_tokens {geometry.draft.num_draft_tokens} is not served: {OPERATOR} takes {MAX_ROWS} rows per "
            "request; draft fewer tokens"
        )
    return reasons
