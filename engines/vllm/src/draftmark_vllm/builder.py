"""vLLM's builder of attention metadata. vLLM calls it before each eager forward, each capture and each replay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from draftmark import AttentionShape, Form, HostLengthsNeed, Mode
from draftmark.runtime import AttentionBackend, ForwardBatch, RankGuard, step_digest
from draftmark_engines import EngineError

from . import reservation
from .batch_runs import BatchRun, split_decodes_prefills
from .bound_backends import OTHER_BACKEND, BoundBackends, Geometries
from .checking import check_batch
from .limits import chosen_backend, engine_limits, limits_of_chunks, profile_of, serves_trees
from .metadata_graphs import MetadataGraphs
from .settings import Settings
from .step import Step, StepBuffers, part, refresh
from .trees.step_trees import current_trees
from .trees.tails import TreeTails

Part = tuple[int, ForwardBatch, dict[AttentionShape, AttentionBackend]]


@dataclass
class StepMetadata:
    """Attention metadata of one step, which every layer of a KV group reads in its forward.

    Not frozen, because vLLM's builder for chunked attention adds attributes.

    Attributes:
        parts: one entry for each run of the step: its first row, its batch, and its backends by the layer's shape.
        seq_lens: int32 ``[R]``, vLLM's own lengths, for a refresh inside a graph.
    """

    parts: tuple[Part, ...]
    seq_lens: torch.Tensor


class DraftmarkBuilder(AttentionMetadataBuilder[StepMetadata]):  # type: ignore[misc]
    """Builds the attention metadata of each step for the layers of one KV group.

    vLLM calls builders and layers one at a time, in the worker's loop. With dual batch overlap two threads alternate
    (``_cpu_yield`` in v1/worker/ubatching.py), each with builders of its own. The thread for asynchronous outputs
    (``async_output_busy_loop`` in v1/executor/multiproc_executor.py) calls neither.
    """

    supports_draft_decode_metadata_update: bool = False
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        reservation.release()
        self._require_decodes_first()
        self._debug = Settings.read(vllm_config.additional_config).debug
        layers = self._layers()
        # The chunk size is read from the layers, because chunked and full-attention layers can share one KV spec.
        (self._chunk,) = {getattr(one, "attention_chunk_size", None) for one in layers}
        self._limits = limits = limits_of_chunks(engine_limits(vllm_config), self._chunk)
        self._verify_rows, self._exact = limits.num_draft_tokens, not limits.host_lag
        self._backend = chosen_backend(vllm_config, device.type)
        self._bind(layers)
        geometry = self._bound.any.decode_verify
        columns = 0 if Form.ENGINE_TABLE in geometry.forms else geometry.max_pages_per_req
        self._buffers = StepBuffers(limits.max_num_reqs, limits.max_num_tokens, device, columns)
        self._tails = TreeTails(self._bound.any.decode_verify, device) if serves_trees(vllm_config) else None
        self._guard = _rank_guard() if self._debug else None
        self._graphs = self._new_graphs()

    def _require_decodes_first(self) -> None:
        """Make runner V1 put decodes before prompts if drafts are trees. After a prompt, a tree runs as a chain."""
        if serves_trees(self.vllm_config):
            self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def _bind(self, layers: list[Any]) -> None:
        """Open the backends for the layers that the KV group has now. A draft model may add layers later."""
        self._num_layers = len(self.layer_names)
        backend = self._backend
        self._bound = BoundBackends(backend, self._shapes(layers), self._limits, profile_of(self.device), self.device)
        # vLLM captures this update in a graph, which cannot run `plan`. So the backend must need no host lengths.
        self.supports_draft_decode_metadata_update = self._bound.need is HostLengthsNeed.NONE
        # A backend that needs no host lengths gets none: computing them takes longer than the rest of a step. Prompts
        # are an exception: they run far longer, and a backend can choose kernels by their lengths. Chunked layers get
        # none either: up to 0.29 vLLM passes the bounds of whole requests with them.
        self._host_lengths = self._chunk is None and (self._debug or self._bound.need is not HostLengthsNeed.NONE)
        if self._chunk is not None and self._bound.need is HostLengthsNeed.EXACT:
            raise EngineError(
                f"backend {backend.info.name} plans from exact lengths, but vLLM has none for layers with chunks of "
                f"{self._chunk} positions; choose another backend"
            )
        # If no layer stores KV (Gemma 4's assistant), slots are not checked: runner V1 passes another group's slots.
        self._writes = any(getattr(one, "kv_sharing_target_layer_name", None) is None for one in layers)

    def _new_graphs(self) -> MetadataGraphs | None:
        """Return metadata graphs; None with host lengths, chunks, trees or debug checks, which no replay can update."""
        has_more_inputs = self._host_lengths or self._debug or self._chunk is not None or self._tails is not None
        return None if has_more_inputs else MetadataGraphs(self._bound, self._buffers, self.device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Return UNIFORM_BATCH: graphs for batches with equal rows per request.

        Return NEVER for a backend that plans from exact lengths.
        """
        from vllm.platforms import current_platform

        device = current_platform.device_type
        backend = chosen_backend(vllm_config, device)
        exact = HostLengthsNeed.EXACT in {
            backend.requirements(one).host_lengths for one in _usual_geometries(backend, vllm_config, device)
        }
        return AttentionCGSupport.NEVER if exact else AttentionCGSupport.UNIFORM_BATCH

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StepMetadata:
        """Split a step into runs, build a batch for each run, plan, and write metadata on the device."""
        return self._build(common_attn_metadata, capture=False)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> StepMetadata:
        """Build a step that vLLM captures. It has no host lengths, because its plan must be valid in every replay."""
        return self._build(common_attn_metadata, capture=True)

    def update_draft_decode_metadata(self, metadata: StepMetadata) -> None:
        """Recompute all metadata on the device from vLLM's lengths. vLLM captures this call with its draft steps."""
        for first, batch, backends in metadata.parts:
            assert batch.mode is Mode.DECODE and not first, "a draft step has one part, and its mode is DECODE"
            refresh(batch, metadata.seq_lens[: batch.padded_reqs])
            for backend in backends.values():
                backend.write_metadata(batch)

    def _build(self, cam: Any, capture: bool) -> StepMetadata:
        if len(self.layer_names) != self._num_layers:  # runner V1 has added a draft model's layers since
            self._bind(self._layers())
            self._graphs = self._new_graphs()
        step = _step(cam, capture or not self._host_lengths, self._exact)
        runs = split_decodes_prefills(step.query_start_host, step.num_rows, self._verify_rows, self._bound.any.ragged)
        parts = []
        for run in runs:
            if run.mode is Mode.EXTEND and step.seq_bounds is None and not capture and self._chunk is None:
                step = replace(step, seq_bounds=_bounds(cam))  # only for EXTEND, a step's last run
            batch = None if self._graphs is None else self._graphs.prepare(step, run)
            if batch is None:
                batch = self._launch(step, run, capture)
            parts.append((run.first_row, batch, self._bound.of(run.mode)))
        return StepMetadata(tuple(parts), step.seq_lens)

    def _launch(self, step: Step, run: BatchRun, capture: bool) -> ForwardBatch:
        """Prepare a run by separate kernel launches. If vLLM captures the step, capture these launches as well."""
        batch = self._buffers.forward(step, run, self._bound.geometry(run.mode))
        if self._tails is not None and run.mode in (Mode.VERIFY, Mode.RAGGED_VERIFY):
            batch = replace(batch, tail=self._tails.write(run, current_trees()))
        if self._debug and not capture:
            self._check(batch, part(step.slots, run.first_row, run.num_rows))
        self._bound.prepare(batch)
        if capture and self._graphs is not None:
            self._graphs.capture(step, run, batch)
        return batch

    def _check(self, batch: ForwardBatch, slots: torch.Tensor) -> None:
        geometry = self._bound.geometry(batch.mode)
        check_batch(batch, geometry, slots if self._writes else slots[:0])
        if self._guard is not None:
            self._guard.observe(step_digest(batch, geometry.attention.page_size))

    def _layers(self) -> list[Any]:
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        return list(get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase, self.layer_names).values())

    def _shapes(self, layers: list[Any]) -> set[AttentionShape]:
        model_dtype = self.vllm_config.model_config.dtype
        page_size = self.kv_cache_spec.block_size
        return {one.impl.shape(page_size, getattr(one, "dtype", model_dtype)) for one in layers}


def _step(cam: Any, without_lengths: bool, exact: bool) -> Step:
    """Convert vLLM's `CommonAttentionMetadata` to a `Step`. If `without_lengths`, leave out the host's lengths.

    Raises:
        EngineError: attention is not causal, or the device decides which rows are causal.
    """
    if cam.causal is not True:
        raise EngineError("a step has attention that is not causal, which is not served; " + OTHER_BACKEND)
    return Step(
        query_start=cam.query_start_loc,
        query_start_host=tuple(cam.query_start_loc_cpu.tolist()),
        seq_lens=cam.seq_lens,
        page_table=cam.block_table_tensor,
        slots=cam.slot_mapping,
        num_rows=cam.num_actual_tokens,
        seq_bounds=None if without_lengths else _bounds(cam),
        exact=exact,
    )


def _bounds(cam: Any) -> tuple[int, ...] | None:
    """Return the host's upper bounds of the KV lengths, one for each request; None if the host has no bounds."""
    bounds = cam.seq_lens_cpu_upper_bound
    return None if bounds is None else tuple(bounds.tolist())


def _usual_geometries(backend: Any, config: Any, device: str) -> tuple[Any, ...]:
    """Return the geometries of a layer with the model's configured heads, for facts that depend only on the backend."""
    from .limits import layer_shape

    model, parallel = config.model_config, config.parallel_config
    shape = layer_shape(
        model.get_num_attention_heads(parallel),
        model.get_num_kv_heads(parallel),
        model.get_head_size(),
        config.cache_config.block_size,
        model.dtype,
        config.cache_config.cache_dtype,
    )
    return Geometries.of(backend, shape, engine_limits(config), profile_of(device)).each()


def _rank_guard() -> RankGuard | None:
    """Return a guard that compares the steps of tensor-parallel ranks; None with one rank."""
    from vllm.distributed.parallel_state import get_tp_group

    try:
        group = get_tp_group()
    except AssertionError:  # a test made the builder without tensor-parallel process groups
        return None
    return RankGuard(group.device_group) if group.world_size > 1 else None
