"""Attention shapes of real models and of their ranks: heads, head_dim, page size, KV dtype, window, cap, sinks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from draftmark import DTYPE_BYTES

PACKED = ("tokens", "heads")
"""Ways to pack K and V into one page.

* tokens: K of all heads, then V of all heads, as draftmark in vLLM.
* heads: K and V of each head, as vLLM's own backends.
"""


@dataclass(frozen=True)
class Model:
    """Attention shape of one layer. Queries are bf16.

    Attributes:
        heads, kv_heads, dim, page: query heads, KV heads, head_dim, tokens per page.
        kv_dtype: bfloat16, or float8_e4m3fn with one scale per tensor.
        window: tokens that a row sees, itself included, as in models' configurations; 0 without a window.
        cap: soft cap of the scores; 0.0 without one.
        sinks: each query head has an attention sink.
        packed: way in which K and V share pages, one of PACKED; "" for separate tensors.
        rounded: over e4m3, queries and softmax weights may be rounded to e4m3 too (`AttentionShape.round_to_e4m3`).
    """

    heads: int
    kv_heads: int
    dim: int
    page: int = 64
    kv_dtype: str = "bfloat16"
    window: int = 0
    cap: float = 0.0
    sinks: bool = False
    packed: str = ""
    rounded: bool = False

    @property
    def shape(self) -> str:
        """Heads, KV heads and head_dim in the form that row names use: 32/8x128."""
        return f"{self.heads}/{self.kv_heads}x{self.dim}"

    @property
    def kind(self) -> str:
        """Unusual properties, as case names spell them: -e4m3-rounded-w128-cap50-sinks-heads."""
        properties = {
            "e4m3": self.is_narrow,
            "rounded": self.rounded,
            f"w{self.window}": self.window,
            f"cap{self.cap:g}": self.cap,
            "sinks": self.sinks,
            self.packed: self.packed,
        }
        return "".join(f"-{name}" for name, present in properties.items() if present)

    @property
    def is_narrow(self) -> bool:
        """True if KV is e4m3."""
        return self.kv_dtype == "float8_e4m3fn"

    @property
    def window_left(self) -> int:
        """Positions that a row sees to its left, as kernels expect it; -1 without a window."""
        return self.window - 1

    @property
    def scale(self) -> float:
        """Factor on q·k."""
        return float(self.dim**-0.5)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V per token."""
        return self.kv_heads * self.dim * 2 * DTYPE_BYTES[self.kv_dtype]

    def paged(self, page: int) -> Model:
        """Return the shape with another page size."""
        return replace(self, page=page)

    def seen(self, length: int) -> int:
        """Return the number of prefix tokens, out of `length`, that the first new token sees within the window."""
        return min(length, self.window_left) if self.window else length

    def narrow(self, rounded: bool = False) -> Model:
        """Return the shape with e4m3 KV."""
        return replace(self, kv_dtype="float8_e4m3fn", rounded=rounded)


STANDARD = Model(32, 8, 128)
"""Shape of Llama-3-8B and Qwen3-8B, used in README's table."""
MODELS = {
    "llama-3-8b, qwen3-8b (group 4)": STANDARD,
    "qwen2.5-7b (group 7)": Model(28, 4, 128),
    "qwen2.5-14b, -32b (group 5)": Model(40, 8, 128),
    "llama-3-70b (group 8)": Model(64, 8, 128),
    "gpt-oss, without its sinks (group 8)": Model(64, 8, 64),
    "gpt-oss, every other layer (group 8)": Model(64, 8, 64, sinks=True),
    "gpt-oss, its layers with a window (group 8)": Model(64, 8, 64, window=128, sinks=True),
    "llama-3.2-1b (group 4)": Model(32, 8, 64),
    "llama-3.2-3b (group 3)": Model(24, 8, 128),
    "phi-3-mini (group 1)": Model(32, 32, 96),
    "phi-2 (group 1)": Model(32, 32, 80),
    "danube-3-4b (group 4)": Model(32, 8, 120),
    "stablelm-2-12b (group 4)": Model(32, 8, 160),
    "mistral-large on 4 ranks (group 12)": Model(24, 2, 128),
    "mixtral-8x22b (group 6)": Model(48, 8, 128),
    "llama-3-70b on 4 ranks (group 8)": Model(16, 2, 128),
    "llama-3-70b on 8 ranks (group 8)": Model(8, 1, 128),
    "qwen3-235b on 4 ranks (group 16)": Model(16, 1, 128),
    "gemma-2-9b, without its cap (group 2)": Model(16, 8, 256),
    "gemma-2-9b, every other layer (group 2)": Model(16, 8, 256, cap=50.0),
    "gemma-2-9b, its layers with a window (group 2)": Model(16, 8, 256, window=4096, cap=50.0),
    "gemma-2-27b, every other layer (group 2)": Model(32, 16, 128, cap=50.0),
    "gemma-3-12b, its layers with a window (group 2)": Model(16, 8, 256, window=1024),
    "gemma-3-27b, its layers with a window (group 2)": Model(32, 16, 128, window=1024),
    "mistral-7b-v0.1 (group 4)": Model(32, 8, 128, window=4096),
    "qwen3-next (group 8)": Model(16, 2, 256),
    "16/4 of 256 (group 4)": Model(16, 4, 256),
    "32/16 of 256 (group 2)": Model(32, 16, 256),
    "24/8 of 96 (group 3)": Model(24, 8, 96),
    "40/8 of 96 (group 5)": Model(40, 8, 96),
    "multi-head (group 1)": Model(32, 32, 128),
}
"""Shapes that engines serve today, whole or one rank's share, from the models' published configurations."""
