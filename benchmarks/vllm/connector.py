"""A KV connector that says of chosen requests that their KV is there already: a decode is timed without its prefill,
and a prefill behind a context without that.

vLLM asks a connector how many tokens of a request it need not compute. This one answers "all but the last n" for
requests with ``extra_args={"kv_transfer_params": {"left": n}}`` and moves nothing: the pages hold what was in memory
before, which the benchmark fills with random numbers once (`memory`).
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
    """`SamplingParams.extra_args` of a request of whose prompt only the last tokens are computed."""
    return {"kv_transfer_params": {"left": left}}


class Nothing(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler tells the worker."""


class AlreadyThere(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Claims tokens, moves none."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """All but the last tokens of a chosen request."""
        left = (getattr(request, "kv_transfer_params", None) or {}).get("left")
        return (max(0, request.num_tokens - left - num_computed_tokens) if left else 0), False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Say nothing."""
        return Nothing()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Pages are taken as they are."""

    def start_load_kv(self, forward_context: Any, **more: Any) -> None:
        """Load nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **more: Any) -> None:
        """Save nothing."""

    def wait_for_save(self) -> None:
        """Wait for nothing."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Pages are free at once."""
        return False, None
