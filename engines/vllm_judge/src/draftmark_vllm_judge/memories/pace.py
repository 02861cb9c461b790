"""Stands in for vLLM's part of the model runner of pace-vllm (AMD), which keeps KV in slabs by sequence.

pace-vllm's own code runs unchanged: its backend, its memory, its native kernels, and the method `_update_states` of its
model runner, which starts, ends and resets sequences. Only the method of vLLM's runner that it calls last is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pace_vllm
import torch

from draftmark.errors import DraftmarkError

from ..sequence_memory import Schedule

if pace_vllm.register() is None:
    raise DraftmarkError(
        "pace-vllm is not active here: it needs a CPU with AVX512_BF16 and a vLLM in the range "
        f"{pace_vllm._PACE_VLLM_SUPPORTED_VLLM_RANGE}"
    )

from pace_vllm.v1.attention.backends.pace_attn import PaceAttentionBackend
from pace_vllm.v1.attention.layer_registry import clear_layer_registry, register_layer, set_current_kv_cache
from pace_vllm.v1.kv_cache import PaceKVCache, PaceKVCacheSpec
from pace_vllm.v1.worker.cpu_model_runner import PaceModelRunner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class PaceMemory:
    """pace-vllm's memory for the layers of one model."""

    backend = PaceAttentionBackend

    def __init__(self, layers: Sequence[str], spec: Any, config: Any, num_tokens: int) -> None:
        block = int(torch.ops.pace.slab_autotune_block_size(spec.num_kv_heads, spec.head_size))
        requests = config.scheduler_config.max_num_seqs
        sizes = PaceKVCacheSpec.uniform(
            num_layers=len(layers),
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_size,
            block_size=block,
            num_blocks=-(-num_tokens // block) + 2 * requests,
            dtype=spec.dtype,
        )
        self._cache, self._layers = PaceKVCache(sizes, list(layers)), tuple(layers)
        self._runner: Any = object.__new__(PaceModelRunner)
        self._runner.pace_kv_cache, self._runner._pace_connector = self._cache, None
        self._runner.model_config = config.model_config
        self._runner.input_batch = SimpleNamespace(req_ids=[])
        self._cache.set_owner(self._runner)
        self._make_current()

    def _make_current(self) -> None:
        """Put this memory into pace-vllm's registry, which serves one model per process; the judge may open two."""
        clear_layer_registry()
        for name in self._layers:
            register_layer(name, self._cache, self._cache.pool_for_layer(self._cache.layer_idx_of(name)))
        set_current_kv_cache(self._cache)

    def update(self, schedule: Schedule) -> None:
        """Hand the scheduler's output to pace-vllm's runner, and set the order of the batch as vLLM's runner does."""
        self._make_current()
        running = [name for name in schedule.computed if name not in schedule.new]
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in schedule.new],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=running, num_computed_tokens=[schedule.computed[name] for name in running]
            ),
            num_scheduled_tokens=dict(schedule.rows),
            finished_req_ids=set(schedule.finished),
            preempted_req_ids=set(),
        )
        with patch.object(CPUModelRunner, "_update_states", lambda runner, output: None):
            self._runner._update_states(output)
        self._runner.input_batch.req_ids = list(schedule.computed)
