"""Attention shapes of real models and of their ranks: heads, head_dim, page size, dtype of KV; window, cap, sinks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from draftmark import DTYPE_BYTES

PACKED = ("tokens", "heads")
"""Of a token K of all heads and then V of all, as draftmark's in vLLM; K and V of each head, as vLLM's own backends."""


@dataclass(frozen=True)
class Model:
    """What a layer's attention looks like to a kernel; queries are bf16.

    Attributes:
        heads, kv_heads, dim, page: query heads, KV heads, head_dim, tokens of a page.
        kv_dtype: bfloat16, or float8_e4m3fn with one scale a tensor.
        window: tokens that a row sees, its own counted, as models' configurations say it; 0: all before it.
        cap: of the soft cap of scores; 0.0: none.
        sinks: each query head has one.
        packed: how K and V share pages, one of PACKED; "" where they lie apart.
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

    @property
    def shape(self) -> str:
        """As rows name it: 32/8x128."""
        return f"{self.heads}/{self.kv_heads}x{self.dim}"

    @property
    def kind(self) -> str:
        """What is not usual about it, as names of cases say it: -e4m3-w128-cap50-sinks-heads."""
        said = {
            "e4m3": self.is_narrow,
            f"w{self.window}": self.window,
            f"cap{self.cap:g}": self.cap,
            "sinks": self.sinks,
            self.packed: self.packed,
        }
        return "".join(f"-{what}" for what, is_so in said.items() if is_so)

    @property
    def is_narrow(self) -> bool:
        """Whether KV is e4m3."""
        return self.kv_dtype == "float8_e4m3fn"

    @property
    def window_left(self) -> int:
        """Positions that a row sees to its left; -1: all, as kernels take it."""
        return self.window - 1

    @property
    def scale(self) -> float:
        """Factor on q·k."""
        return float(self.dim**-0.5)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of a token."""
        return self.kv_heads * self.dim * 2 * DTYPE_BYTES[self.kv_dtype]

    def paged(self, page: int) -> Model:
        """The same with another page size."""
        return replace(self, page=page)

    def seen(self, length: int) -> int:
        """Tokens of so many before a tail that its first row sees."""
        return min(length, self.window_left) if self.window else length

    def narrow(self) -> Model:
        """The same with e4m3 KV."""
        return replace(self, kv_dtype="float8_e4m3fn")


STANDARD = Model(32, 8, 128)
"""Llama-3-8B and Qwen3-8B; what the table of README is of."""
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
    "multi-head (group 1)": Model(32, 32, 128),
}
"""Shapes that engines serve today, from the models' published configurations, whole or one rank's share."""
