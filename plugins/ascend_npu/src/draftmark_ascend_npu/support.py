"""Reasons for which the plugin refuses a geometry. Reads only integers and names. Each limit cites its source.

*Page* is torch_npu's page of npu_fused_infer_attention_score for the products A2 and A3. *Host code* is the public host
part of that operator in CANN 8.5 to 9.1. The host code decides where it accepts more than the page and vllm-ascend
relies on it.
"""

from __future__ import annotations

from draftmark import Form, Geometry, Mode

from . import sizing

BLOCK_STEP, MAX_BLOCK = 16, 512
"""Tokens of a page: multiples of 16, at most 512 (host code, TND). vllm-ascend and SGLang use 128."""
HEAD_STEP, MAX_HEAD_DIM = 16, 256
"""Head sizes if query heads share KV heads: multiples of 16, at most 256 (host code, TND)."""
UNGROUPED_HEAD_DIMS = (64, 128, 192)
"""Head sizes if each query head has its own KV head: CANN before 9 uses another path for them (host code, TND)."""
MAX_HEADS = 256
MAX_GROUP = 64
"""Query heads of one KV head (page, num_key_value_heads)."""
MAX_ROW = 65535
"""Elements of one token's keys in the paged layout [blocks, block, heads · D] (page, PageAttention)."""
MAX_REQUESTS = 4096
"""Entries of actual_seq_lengths in TND (page, TND limits)."""
MAX_SLOTS = 2**31
"""Slots are stored as int32, as vllm-ascend and SGLang pass them. No device has memory for a larger pool."""
LATENT_VALUE, LATENT_REST, LATENT_BLOCK, LATENT_ROWS = 512, 64, 128, sizing.PIECE_ROWS
"""Latent rows: elements of the two parts, tokens of a page, and most rows of a request in TND (vllm-ascend, mla_v1)."""
LATENT_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
DTYPES = ("float16", "bfloat16")
ARCHES = (0, 910)
"""`DeviceProfile.arch` of A2 and A3; 0 means that the profile does not name it."""


def reasons_against(geometry: Geometry) -> list[str]:
    """Return every reason for which `geometry` is refused; an empty list means that it is served."""
    a = geometry.attention
    reasons = [*_device(geometry), *(_latent(geometry) if a.latent else _shape(geometry))]
    if a.q_dtype not in DTYPES or a.kv_dtype != a.q_dtype:
        reasons.append(f"q_dtype {a.q_dtype} with kv_dtype {a.kv_dtype} is not served: both are float16 or bfloat16")
    if a.window_left >= 0:
        reasons.append(f"window_left {a.window_left} is not served: a window over a tree's depths has no sparse_mode")
    if a.logits_soft_cap > 0:
        reasons.append(f"logits_soft_cap {a.logits_soft_cap} is not served: the operator has no cap")
    if a.sinks:
        reasons.append("attention sinks are not served: the operator has none; its v2 takes learnable_sink")
    if geometry.max_reqs > MAX_REQUESTS:
        reasons.append(f"{geometry.max_reqs} requests are not served: a length list holds at most {MAX_REQUESTS}")
    return reasons


def _device(geometry: Geometry) -> list[str]:
    device = geometry.device
    if device.kind not in ("npu", "cpu"):
        return [f"device kind {device.kind} is not served: the operators exist only on npu"]
    if device.kind == "npu" and device.arch not in ARCHES:
        return [f"arch {device.arch} is not served: the operators' rules are for A2 and A3 (910)"]
    return []


def _shape(geometry: Geometry) -> list[str]:
    a = geometry.attention
    reasons = []
    if a.page_size % BLOCK_STEP or a.page_size > MAX_BLOCK:
        reasons.append(
            f"page_size {a.page_size} is not served: pages have a multiple of {BLOCK_STEP} tokens, at most {MAX_BLOCK}"
        )
    if a.num_qo_heads == a.num_kv_heads and a.head_dim not in UNGROUPED_HEAD_DIMS:
        reasons.append(f"head_dim {a.head_dim} without grouped heads is not served: TND then takes 64, 128 or 192")
    elif a.head_dim % HEAD_STEP or a.head_dim > MAX_HEAD_DIM:
        reasons.append(
            f"head_dim {a.head_dim} is not served: heads have a multiple of {HEAD_STEP} values, at most {MAX_HEAD_DIM}"
        )
    if a.num_qo_heads > MAX_HEADS or a.group_size > MAX_GROUP:
        reasons.append(
            f"{a.num_qo_heads} query heads on {a.num_kv_heads} KV heads are not served: "
            f"at most {MAX_HEADS} heads and {MAX_GROUP} to a KV head"
        )
    if a.num_kv_heads * a.head_dim > MAX_ROW:
        reasons.append(f"{a.num_kv_heads} KV heads of {a.head_dim} are not served: at most {MAX_ROW} values a token")
    return reasons


def _latent(geometry: Geometry) -> list[str]:
    """Refuse latent rows that the operator's query_rope and key_rope do not serve."""
    a, rest = geometry.attention, geometry.attention.head_dim - geometry.attention.value_width
    reasons = []
    if (a.value_width, rest) != (LATENT_VALUE, LATENT_REST):
        reasons.append(
            f"latent rows of {a.value_width}+{rest} elements are not served: the operator takes "
            f"{LATENT_VALUE}+{LATENT_REST}"
        )
    if Form.LATENT_PARTS not in geometry.forms:
        reasons.append(
            "latent rows in one buffer are not served: the operator reads value parts and rests from two buffers; add "
            "Form.LATENT_PARTS"
        )
    if a.page_size != LATENT_BLOCK:
        reasons.append(f"page_size {a.page_size} is not served for latent rows: their pages have {LATENT_BLOCK} tokens")
    if a.num_qo_heads > LATENT_HEADS[-1]:
        reasons.append(f"num_qo_heads {a.num_qo_heads} of a latent layer is not served: at most {LATENT_HEADS[-1]}")
    for mode in geometry.modes:
        if mode is not Mode.EXTEND and geometry.extent(mode).q_len > LATENT_ROWS:
            reasons.append(
                f"{geometry.extent(mode).q_len} rows of a request in mode {mode.value} are not served for latent rows: "
                f"the operator takes {LATENT_ROWS} in TND; draft fewer tokens"
            )
    if Mode.EXTEND in geometry.modes and sizing.max_pieces(geometry) > MAX_REQUESTS:
        reasons.append(
            f"{sizing.max_pieces(geometry)} pieces of {LATENT_ROWS} rows in mode extend are not served: a length list "
            f"holds at most {MAX_REQUESTS}; lower max_extend_tokens"
        )
    return reasons
