"""What is refused, in sentences. Integers and names only; each limit cites the operator page that it comes from."""

from __future__ import annotations

from draftmark import Geometry

BLOCK = 128
"""Tokens of a page: the one size that every branch of the operator documents (page, block_size)."""
HEAD_DIM = 128
"""TND without rope takes 128, or 192 for keys (page, TND limits); values are 128."""
MAX_HEADS = 256
MAX_GROUP = 64
"""Query heads of one KV head (page, num_key_value_heads)."""
MAX_ROW = 65535
"""Elements of one token's keys in the paged layout [blocks, block, heads · D] (page, PageAttention)."""
MAX_REQUESTS = 4096
"""Entries of actual_seq_lengths in TND (page, TND limits)."""
DTYPES = ("float16", "bfloat16")


def reasons_against(geometry: Geometry) -> list[str]:
    """Every reason why `geometry` is not served; none means it is."""
    a = geometry.attention
    reasons = []
    if geometry.device.kind not in ("npu", "cpu"):
        reasons.append(f"device kind {geometry.device.kind} is not served: the operators exist on npu alone")
    if a.page_size != BLOCK:
        reasons.append(f"page_size {a.page_size} is not served: pages have {BLOCK} tokens")
    if a.head_dim != HEAD_DIM:
        reasons.append(f"head_dim {a.head_dim} is not served: the TND layout takes {HEAD_DIM}")
    if a.q_dtype not in DTYPES or a.kv_dtype != a.q_dtype:
        reasons.append(f"q_dtype {a.q_dtype} with kv_dtype {a.kv_dtype} is not served: both are float16 or bfloat16")
    if a.window_left >= 0:
        reasons.append(f"window_left {a.window_left} is not served: a window over a tree's depths has no sparse_mode")
    if a.logits_soft_cap > 0:
        reasons.append(f"logits_soft_cap {a.logits_soft_cap} is not served: the operator has no cap")
    if a.num_qo_heads > MAX_HEADS or a.group_size > MAX_GROUP:
        reasons.append(
            f"{a.num_qo_heads} query heads on {a.num_kv_heads} KV heads are not served: "
            f"at most {MAX_HEADS} heads and {MAX_GROUP} to a KV head"
        )
    if a.num_kv_heads * a.head_dim > MAX_ROW:
        reasons.append(f"{a.num_kv_heads} KV heads of {a.head_dim} are not served: at most {MAX_ROW} values a token")
    if geometry.max_reqs > MAX_REQUESTS:
        reasons.append(f"{geometry.max_reqs} requests are not served: a length list holds at most {MAX_REQUESTS}")
    return reasons
