"""Parts of a geometry: modes, forms, attention and draft shapes, limits and device."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .arithmetic import ceil_div

DTYPE_BYTES = {
    "float64": 8,
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

PLAIN_ROWS = "plain"
"""Format of latent rows of head_dim numbers of kv_dtype."""
FP8_DS_MLA = "fp8_ds_mla"
"""Format of latent rows of 656 bytes (DeepSeek V3.2 in FlashMLA, vLLM and SGLang): 512 e4m3 numbers, the value; 4
float32 scales, one for each 128 of these numbers; 64 bfloat16 numbers, the rest. Only the engine writes such rows."""
ROW_FORMATS = (PLAIN_ROWS, FP8_DS_MLA)

SCALE_BLOCK = 128
"""Numbers of a row of `FP8_DS_MLA` that share one scale."""


class Mode(StrEnum):
    """Kind of a forward. In every mode, queries attend to a prefix and a masked tail."""

    EXTEND = "extend"
    """Prefill, whole or chunked: n causal rows per request, n differs by request. Writes KV at [L, L+n)."""
    DECODE = "decode"
    """Decode without drafts: one row per request. Writes KV at L."""
    DRAFT = "draft"
    """Step i of the draft model: topk rows per request over topk·(i+1) tail slots."""
    VERIFY = "verify"
    """Verify a tree or chain: num_draft_tokens rows per request over num_draft_tokens tail slots."""
    DRAFT_EXTEND = "draft_extend"
    """Draft model reads the accepted tokens: num_draft_tokens + num_modules - 1 causal rows per request."""
    RAGGED_VERIFY = "ragged_verify"
    """Verify with 0 … num_draft_tokens rows per request, decided on the device; one row is a plain decode."""
    DRAFT_BLOCK = "draft_block"
    """Draft model proposes a whole block (DFlash): block_size rows per request, causal or with no mask between them."""


CORE_MODES = (Mode.EXTEND, Mode.DECODE, Mode.DRAFT, Mode.VERIFY, Mode.DRAFT_EXTEND)
"""Modes of a backend that does not declare `BackendInfo.modes`."""
TARGET_MODES = (Mode.EXTEND, Mode.DECODE, Mode.VERIFY)
DRAFT_MODES = (Mode.EXTEND, Mode.DRAFT, Mode.DRAFT_EXTEND)


class Form(StrEnum):
    """Engine-specific format of a batch or cache, instead of the core's. A backend declares the forms it accepts."""

    ENGINE_SLOTS = "engine_slots"
    """The engine gives `ForwardBatch.slots`, the KV slot of each row; -1 stores nothing."""
    ENGINE_TABLE = "engine_table"
    """A page table wider than the geometry's, with any row pitch; entries after a request's pages are undefined."""
    STRIDED_KV = "strided_kv"
    """K and V are views of packed pages: head_dim is contiguous, and page, token and head each have one pitch.

    K and V may have different pitches.
    """
    ENGINE_STORES = "engine_stores"
    """The engine writes KV itself, before `attend`. It never calls `AttentionBackend.write_kv`."""
    LATENT_PARTS = "latent_parts"
    """A latent row lies in two buffers: its value part and its rest. See `KVCache.latent`."""


LAYOUT_FORMS = (Form.ENGINE_SLOTS, Form.ENGINE_TABLE, Form.STRIDED_KV)
"""Forms of the engine's own slots, page table and page layout, which any layer can have."""


@dataclass(frozen=True)
class Extent:
    """Query rows and tail slots of each request in a uniform forward; the maximum in a ragged forward."""

    q_len: int
    tail_len: int


@dataclass(frozen=True)
class AttentionShape:
    """Shape of one attention layer, per tensor-parallel rank.

    A model with layers of different shapes has one geometry per distinct shape.

    Attributes:
        num_qo_heads, num_kv_heads: query and KV heads of this rank; num_qo_heads is a multiple of num_kv_heads.
        head_dim: elements of one head of Q and K; in a latent layer, elements of a whole row.
        page_size: tokens of a KV page.
        q_dtype: torch dtype name of queries, new keys and values, and outputs; one of `Q_DTYPES`.
        kv_dtype: torch dtype name of the KV cache; one of `KV_DTYPES`.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    softmax_scale: float | None = None
    """Factor on q·k; `Geometry.create` replaces None by head_dim ** -0.5."""
    window_left: int = -1
    """Visible positions left of a query, without the query's own; -1 means all (Hugging Face's window - 1)."""
    logits_soft_cap: float = 0.0
    """cap in cap · tanh(logit / cap), applied after scaling; 0 means no cap."""
    sinks: bool = False
    """Each query head has an attention sink: a logit in `KVCache.sinks`, without a value vector (gpt-oss)."""
    value_dim: int | None = None
    """Elements of a value and of one head's output; None means head_dim. At most head_dim."""
    latent: bool = False
    """The layer stores one row per token (MLA, absorbed). A key is the whole row; its value is the first value_dim
    elements of the row. num_kv_heads is 1, and softmax_scale is required."""
    chosen_width: int = 0
    """Most keys that one row attends to, if an indexer chooses the keys of each row (sparse attention of DeepSeek V3.2
    and GLM-5); 0 for a layer without lists. See `draftmark.runtime.Chosen`."""
    round_to_e4m3: bool = False
    """attend may round its operands to e4m3, as K and V are stored, and is then not exact to q_dtype. It scales each
    row of each query head by a power of two, to a largest element in [128, 256), and rounds it to e4m3. It rounds
    softmax weights with an error of at most 2**-4 of each, or 2**-17 of the row's largest."""
    row_format: str = PLAIN_ROWS
    """Format of a latent layer's rows in the cache. head_dim and value_dim count numbers in every format."""

    @property
    def value_width(self) -> int:
        """Elements of a value and of one head's output: value_dim, or head_dim if value_dim is None."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def row_width(self) -> int:
        """Elements of kv_dtype in a stored key: head_dim, or 656 bytes in `FP8_DS_MLA`."""
        if self.row_format == PLAIN_ROWS:
            return self.head_dim
        scales = ceil_div(self.value_width, SCALE_BLOCK)
        return (
            self.value_width
            + DTYPE_BYTES["float32"] * scales
            + DTYPE_BYTES["bfloat16"] * (self.head_dim - self.value_width)
        )

    @property
    def group_size(self) -> int:
        """Number of query heads that share one KV head."""
        return self.num_qo_heads // self.num_kv_heads


@dataclass(frozen=True)
class DraftShape:
    """Shape of a request's drafts. D is independent of S + 1; D = 1 means no speculation.

    Attributes:
        topk: branches of each draft step, k; 1 for a chain.
        num_steps: draft steps of a round, S; the draft model runs S - 1 DRAFT forwards.
        num_draft_tokens: rows of one request in VERIFY, root included, D.
    """

    topk: int = 1
    num_steps: int = 1
    num_draft_tokens: int = 1
    block_size: int = 0
    """Rows of a DRAFT_BLOCK forward, root included; 0 for a draft model that proposes token by token."""
    num_modules: int = 1
    """MTP modules of the draft model, n. KV of the newest n - 1 tokens follows from drafts, so that DRAFT_EXTEND writes
    it again, in n - 1 more rows before the accepted ones."""


@dataclass(frozen=True)
class Limits:
    """Limits that the engine never exceeds.

    Attributes:
        max_num_reqs: live requests of a batch.
        max_context_len: tokens of a request, C: prompt plus output.
        capture_batch_sizes: padded batch sizes, in requests, for which graphs are captured.
    """

    max_num_reqs: int
    max_context_len: int
    max_extend_tokens: int = 2048
    """Query rows of one EXTEND forward, summed over its requests."""
    capture_batch_sizes: tuple[int, ...] = ()
    overlap: bool = False
    """The device may be one step ahead of the host. Default value for `overshoot` and `host_lag`."""
    overshoot: bool | None = None
    """A committed length may exceed max_context_len by one tail, because a step starts before the last one is read.
    None: the value of `overlap`."""
    host_lag: bool | None = None
    """The host may not know the exact lengths when it launches a step. None: the value of `overlap`."""
    row_budgets: tuple[int, ...] = ()
    """Query rows of RAGGED_VERIFY forwards, summed over their requests; one graph each. Empty: max_reqs · D."""
    max_kv_len: int | None = None
    """KV positions of a request, if the engine trims tails at its own limit. None: the longest prefix and one tail."""
    batch_invariant: bool = False
    """A request must have the same output bits in every batch, eager or replayed. The chunks of a prompt may differ in
    their bits from the prompt cut elsewhere."""
    state_interval: int = 0
    """Tokens between two checkpoints of a request's recurrent state, for prefix reuse; 0 for none."""

    @property
    def overshoots(self) -> bool:
        """True if a committed length may exceed max_context_len: `overshoot`, or `overlap` if that is None."""
        return self.overlap if self.overshoot is None else self.overshoot

    @property
    def host_lags(self) -> bool:
        """True if the host may lack exact lengths at launch: `host_lag`, or `overlap` if that is None."""
        return self.overlap if self.host_lag is None else self.host_lag


@dataclass(frozen=True)
class DeviceProfile:
    """Device facts that sizing uses; creating one does not access a driver.

    Attributes:
        kind: torch device type.
        num_sms: SMs of a GPU, cube cores of an NPU, or threads of a CPU.
    """

    kind: str = "cpu"
    arch: int = 0
    """Compute capability times ten on CUDA (90 for sm_90), 0 on other devices."""
    num_sms: int = 1
