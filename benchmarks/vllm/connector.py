"""KV connector that reports the KV of chosen requests as already computed.

With it a decode is timed without its prefill, and a prefill after a context is timed without computing the context.

vLLM asks a connector for the number of tokens of a request that need no compute. This one returns "all except the last
n" for requests with ``extra_args={"kv_transfer_params": {"left": n}}``. It moves no data: attention reads the random
numbers that the benchmark wrote into the KV memory once (`memory`).
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

CONFIG = {"kv_connector": "AlreadyThere", "kv_connector_module_path": __name__, "kv_role": "kv_both"}


def there(left: int) -> dict[str, dict[str, int]]:
    """Return `SamplingParams.extra_args` of a request that computes only the last `left` tokens of its prompt."""
    return {"kv_transfer_params": {"left": left}}


class Nothing(KVConnectorMetadata):  # type: ignore[misc]
    """Empty metadata from the scheduler to the worker."""


class AlreadyThere(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Connector that reports tokens as computed and moves no data."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return the number of a chosen request's tokens that need no compute: all except the last ``left``."""
        left = (getattr(request, "kv_transfer_params", None) or {}).get("left")
        return (max(0, request.num_tokens - left - num_computed_tokens) if left else 0), False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return empty metadata."""
        return Nothing()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Do nothing: the pages keep their contents."""

    def start_load_kv(self, forward_context: Any, **more: Any) -> None:
        """Do nothing: attention reads the KV memory as it is."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: this connector loads no KV."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **more: Any) -> None:
        """Do nothing: this connector saves no KV."""

    def wait_for_save(self) -> None:
        """Return at once: this connector saves no KV."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Let vLLM free the pages at once."""
        return False, None
