"""What a geometry is made of: modes, the attention and draft shapes, the limits and the device."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "uint16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by torch dtype name."""

Q_DTYPES = ("float32", "float16", "bfloat16")
KV_DTYPES = (*Q_DTYPES, "float8_e4m3fn")


class Mode(StrEnum):
    """What a forward does. All seven are one form: a prefix, plus a masked tail."""

    EXTEND = "extend"
    """Prefill, whole or chunked: n ragged causal rows a request, written at [L, L+n)."""
    DECODE = "decode"
    """One row a request, written at L."""
    DRAFT = "draft"
    """Step i of the draft model: topk rows a request over topk·(i+1) tail slots."""
    VERIFY = "verify"
    """num_draft_tokens rows a request, a tree (or a chain) over as many tail slots."""
    DRAFT_EXTEND = "draft_extend"
    """The draft model takes over accepted tokens: num_draft_tokens causal rows a request."""
    RAGGED_VERIFY = "ragged_verify"
    """0 … num_draft_tokens rows a request, decided on the device: a tree or a chain each, and decodes beside them."""
    DRAFT_BLOCK = "draft_block"
    """The draft model proposes a whole block: block_size rows a request that all see each other (DFlash)."""


CORE_MODES = (Mode.EXTEND, Mode.DECODE, Mode.DRAFT, Mode.VERIFY, Mode.DRAFT_EXTEND)
"""What a backend serves that says nothing else of itself."""
TARGET_MODES = (Mode.EXTEND, Mode.DECODE, Mode.VERIFY)
DRAFT_MODES = (Mode.EXTEND, Mode.DRAFT, Mode.DRAFT_EXTEND)


class Form(StrEnum):
    """What an engine's batches may bring instead of the core's own; a backend declares which it takes."""

    ENGINE_SLOTS = "engine_slots"
    """`ForwardBatch.slots`: the engine places each row's KV, -1 stores nothing."""
    ENGINE_TABLE = "engine_table"
    """A page table wider than the geometry's, rows of any pitch; what lies behind a request's pages means nothing."""
    STRIDED_KV = "strided_kv"
    """KV as views of packed pages: the last axis contiguous, one page pitch, one token pitch, one head pitch."""


@dataclass(frozen=True)
class Extent:
    """Query rows and tail slots that each request of a uniform forward has; of a ragged one, the most."""

    q_len: int
    tail_len: int


@dataclass(frozen=True)
class AttentionShape:
    """The shape of one attention layer, per tensor-parallel rank.

    A model whose layers differ in any of these has one geometry per distinct shape.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    softmax_scale: float | None = None
    """Factor on q·k; None means head_dim ** -0.5 and is resolved by `Geometry.create`."""
    window_left: int = -1
    """Positions visible to the left of a query, itself not counted; -1 means all (Hugging Face's window - 1)."""
    logits_soft_cap: float = 0.0
    """cap · tanh(logit / cap) after scaling; 0 means none."""
    sinks: bool = False
    """Each query head has a sink, a logit without a value that `KVCache.sinks` brings (gpt-oss)."""

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_qo_heads // self.num_kv_heads


@dataclass(frozen=True)
class DraftShape:
    """How drafts look. D is independent of S + 1; D = 1 means no speculation."""

    topk: int = 1
    num_steps: int = 1
    num_draft_tokens: int = 1
    block_size: int = 0
    """Rows of a DRAFT_BLOCK forward, the root's included; 0 for a draft model that proposes token by token."""


@dataclass(frozen=True)
class Limits:
    """What the engine promises never to exceed."""

    max_num_reqs: int
    max_context_len: int
    max_extend_tokens: int = 2048
    """Query rows of one EXTEND forward, over all its requests."""
    capture_batch_sizes: tuple[int, ...] = ()
    overlap: bool = False
    """The device may be one round ahead of the host: short for `overshoot` and `host_lag` together."""
    overshoot: bool | None = None
    """A committed length may pass max_context_len by one tail, as when a round is sent before the last is seen."""
    host_lag: bool | None = None
    """The host may not know the exact lengths of a round that it sends. None, here and above: what `overlap` says."""
    row_budgets: tuple[int, ...] = ()
    """Query rows of the RAGGED_VERIFY forwards, over all their requests; one graph each. Empty: max_reqs · D."""
    max_kv_len: int | None = None
    """KV positions that the engine ever asks of a request, where it trims tails at its own wall; None: C and a tail."""

    @property
    def overshoots(self) -> bool:
        """`overshoot`, or what `overlap` says of it."""
        return self.overlap if self.overshoot is None else self.overshoot

    @property
    def host_lags(self) -> bool:
        """`host_lag`, or what `overlap` says of it."""
        return self.overlap if self.host_lag is None else self.host_lag


@dataclass(frozen=True)
class DeviceProfile:
    """What sizing may know of the device; no driver is asked."""

    kind: str = "cpu"
    arch: int = 0
    """Compute capability times ten on CUDA (90 for sm_90), 0 elsewhere."""
    num_sms: int = 1
