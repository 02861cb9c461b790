"""Batches of a step's runs, shared by the builders of vLLM's attention metadata."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport

from draftmark import AttentionShape, Form, HostLengthsNeed, Mode
from draftmark.runtime import BoundBackend, ForwardBatch
from draftmark_engines import EngineError, EngineLimits
from draftmark_engines.ranks import RankGuard, step_digest

from .batch_runs import BatchRun, block_run, joined_run, split_adaptive, split_decodes_prefills
from .bound_backends import OTHER_BACKEND, BoundBackends, Geometries
from .limits import chosen_backend, profile_of, verifies_adaptively
from .metadata_graphs import MetadataGraphs
from .rejection_warmup import warm_up_rejection
from .reservation import RESERVATION
from .settings import Settings
from .step import UNIFORM, Step, StepBuffers, check_batch, part, refresh
from .trees.step_trees import current_trees
from .trees.tails import TreeTails

Part = tuple[int, ForwardBatch, dict[AttentionShape, BoundBackend]]
"""One run of a step: its first row, its batch, and its backends by the layer's shape."""


class PartsBuilder:
    """Base of the metadata builders: it opens the backends of a KV group, and builds the batch of each run of a step.

    A derived class also derives from one of vLLM's builders, which sets `layer_names`, `kv_cache_spec`, `vllm_config`
    and `device`.
    """

    supports_draft_decode_metadata_update: bool = False
    _may_join: bool = False
    layer_names: list[str]
    kv_cache_spec: Any
    vllm_config: Any
    device: torch.device

    def _open(self, limits: EngineLimits, chunk: int | None, tails: bool) -> None:
        """Open the backends, and allocate the static tensors of all steps.

        Args:
            limits: limits of the runs of one step.
            chunk: positions in a chunk of the layers; None for layers without chunks.
            tails: whether drafts are trees.
        """
        RESERVATION.release()
        self._debug = Settings.read(self.vllm_config.additional_config).debug
        self._chunk, self._limits = chunk, limits
        self._adaptive = verifies_adaptively(self.vllm_config)
        self._verify_rows, self._exact = limits.num_draft_tokens, not limits.host_lag
        self._backend = chosen_backend(self.vllm_config, self.device.type)
        self._bind(self._layers())
        geometry = self._bound.any.decode_verify
        columns = 0 if Form.ENGINE_TABLE in geometry.forms else geometry.max_pages_per_req
        self._buffers = StepBuffers(limits.max_num_reqs, limits.max_num_tokens, self.device, columns)
        self._tails = TreeTails(geometry, self.device) if tails else None
        self._guard = _rank_guard() if self._debug else None
        self._graphs = self._new_graphs()
        warm_up_rejection(self.vllm_config, self.device)

    def _bind(self, layers: list[Any]) -> None:
        """Open the backends for the layers that the KV group has now. A draft model may add layers later."""
        self._num_layers = len(self.layer_names)
        backend = self._backend
        self._bound = BoundBackends(backend, self._shapes(layers), self._limits, profile_of(self.device), self.device)
        self._ragged = self._bound.any.ragged
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
        # An EXTEND run over decodes needs a backend that serves one row as fast in EXTEND. A backend that plans from
        # host lengths, or that widens e4m3 keys in each row tile, is faster with two runs.
        self._may_join = self._bound.need is HostLengthsNeed.NONE and all(
            one.kv_dtype == one.q_dtype for one in self._bound.geometries
        )
        # If no layer stores KV (Gemma 4's assistant), slots are not checked: runner V1 passes another group's slots.
        self._writes = any(getattr(one, "kv_sharing_target_layer_name", None) is None for one in layers)

    def _new_graphs(self) -> MetadataGraphs | None:
        """Return metadata graphs; None with host lengths, chunks, trees or debug checks, which no replay can update."""
        has_more_inputs = self._host_lengths or self._debug or self._chunk is not None or self._tails is not None
        return None if has_more_inputs else MetadataGraphs(self._bound, self._buffers, self.device)

    def _parts(self, step: Step, cam: Any, capture: bool) -> tuple[Part, ...]:
        """Split a step into runs, build a batch for each run, plan, and write metadata on the device.

        Args:
            cam: vLLM's `CommonAttentionMetadata`. Its first requests are the step's.
            capture: whether vLLM captures the step, so that its plan must be valid in every replay.
        """
        joins = self._may_join and step.causal and not (capture or self._adaptive or self._tails or self._chunk)
        runs = self._runs(step, joins)
        if step.seq_bounds is None and not capture and self._chunk is None and runs and runs[-1].mode is Mode.EXTEND:
            step = replace(step, seq_bounds=bounds_of(cam))
            runs = self._runs(step, joins)
        parts = []
        for run in runs:
            batch = None if self._graphs is None or run.mode is Mode.EXTEND else self._graphs.prepare(step, run)
            if batch is None:
                batch = self._launch(step, run, capture)
            parts.append((run.first_row, batch, self._bound.of(run.mode)))
        return tuple(parts)

    def _step(self, cam: Any, capture: bool) -> Step:
        """Convert `CommonAttentionMetadata` to a `Step`. It has host lengths if the backend or a prompt needs them."""
        has_prompts = cam.max_query_len > self._verify_rows and self._chunk is None and cam.causal is True
        return step_of(cam, capture or not (has_prompts or self._host_lengths), self._exact)

    def _runs(self, step: Step, joins: bool) -> tuple[BatchRun, ...]:
        """Return the runs of a step: with `joins` one EXTEND run of the whole step, if that is better."""
        starts, bounds = step.query_start_host, step.seq_bounds
        if joins and bounds is not None:
            run = joined_run(starts, self._verify_rows, self._ragged, bounds, self._bound.any.extend)
            if run is not None:
                return (run,)
        return self._split(step)

    def _split(self, step: Step) -> tuple[BatchRun, ...]:
        """Split a step into runs by the rows of its requests."""
        if not step.causal:
            block = block_run(step.query_start_host, step.num_rows, self._bound.any.block)
            return () if block is None else (block,)
        if self._adaptive:
            return split_adaptive(step.query_start_host, step.num_rows, self._verify_rows)
        return split_decodes_prefills(step.query_start_host, step.num_rows, self._verify_rows, self._ragged)

    def _follow_layers(self) -> None:
        """Bind again, because runner V1 has added a draft model's layers."""
        self._bind(self._layers())
        self._graphs = self._new_graphs()

    def _launch(self, step: Step, run: BatchRun, capture: bool) -> ForwardBatch:
        """Prepare a run by separate kernel launches. If vLLM captures the step, capture these launches as well."""
        batch = self._buffers.batch(step, run, self._bound.geometry(run.mode))
        (self._buffers if self._graphs is None else self._graphs).fill(batch, step, run)
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


def refresh_parts(parts: tuple[Part, ...], seq_lens: torch.Tensor, page_table: torch.Tensor | None = None) -> None:
    """Recompute the metadata of a draft step on the device from vLLM's lengths. Capturable.

    Args:
        seq_lens: int32 ``[R]``, KV tokens of each request, including its rows of this step: one row, or a block.
        page_table: int32 ``[R, pages]``, vLLM's; copied for a backend that reads a copy. None leaves the copy as it is.
    """
    for first, batch, backends in parts:
        assert batch.mode in UNIFORM and not first, "a draft step has one part, with equal rows for each request"
        # A block drafter's graph replays without `build`, which would copy the table.
        if page_table is not None and page_table.data_ptr() != batch.page_table.data_ptr():
            theirs = part(page_table, 0, batch.padded_reqs)
            batch.page_table[:, : theirs.shape[1]].copy_(theirs[:, : batch.page_table.shape[1]])
        refresh(batch, seq_lens[: batch.padded_reqs])
        for backend in backends.values():
            backend.write_metadata(batch)


def step_of(cam: Any, without_lengths: bool, exact: bool) -> Step:
    """Convert vLLM's `CommonAttentionMetadata` to a `Step`. If `without_lengths`, leave out the host's lengths.

    Raises:
        EngineError: the device decides which rows are causal.
    """
    if not isinstance(cam.causal, bool):
        raise EngineError("the device decides which rows of a step are causal, which is not served; " + OTHER_BACKEND)
    return Step(
        query_start=cam.query_start_loc,
        query_start_host=tuple(cam.query_start_loc_cpu.tolist()),
        seq_lens=cam.seq_lens,
        page_table=cam.block_table_tensor,
        slots=cam.slot_mapping,
        num_rows=cam.num_actual_tokens,
        seq_bounds=None if without_lengths else bounds_of(cam),
        exact=exact,
        causal=cam.causal,
    )


def bounds_of(cam: Any) -> tuple[int, ...] | None:
    """Return the host's upper bounds of the KV lengths, one for each request; None if the host has no bounds."""
    bounds = cam.seq_lens_cpu_upper_bound
    return None if bounds is None else tuple(bounds.tolist())


def graph_support(config: Any, shape: AttentionShape, limits: EngineLimits) -> Any:
    """Return UNIFORM_BATCH: graphs for batches with equal rows per request.

    Return NEVER for a backend that plans from exact lengths.

    Args:
        shape: a layer with the model's configured heads, for facts that depend only on the backend.
        limits: limits of the layer's runs.
    """
    from vllm.platforms import current_platform

    device = current_platform.device_type
    backend = chosen_backend(config, device)
    made = Geometries.of(backend, shape, limits, profile_of(device))
    exact = HostLengthsNeed.EXACT in {backend.requirements(one).host_lengths for one in made.each()}
    return AttentionCGSupport.NEVER if exact else AttentionCGSupport.UNIFORM_BATCH


def _rank_guard() -> RankGuard | None:
    """Return a guard that compares the steps of tensor-parallel ranks; None with one rank."""
    from vllm.distributed.parallel_state import get_tp_group

    try:
        group = get_tp_group()
    except AssertionError:  # a test made the builder without tensor-parallel process groups
        return None
    return RankGuard(group.device_group) if group.world_size > 1 else None
