"""Attention backend class that SGLang calls for one model, target or draft."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from draftmark import Mode
from draftmark.runtime import ForwardBatch
from draftmark_engines import choose

from .attention import LayerAttention
from .batches import extend_batch, uniform_batch, write_batch
from .facts import facts_of, resolved
from .geometries import modes_of
from .latent import use_absorbed_form
from .options import Options
from .phases import mode_of
from .ranks import ForwardComparison
from .refusals import refuse, require_served, require_served_states
from .state_layers import StateLayers
from .state_shapes import served_states
from .trees import TreeMasks


class DraftmarkBackend(AttentionBackend):  # type: ignore[misc]  # sglang has no types here
    """SGLang's `AttentionBackend` interface: metadata outside the graph, metadata inside it, and each layer's forward.

    SGLang makes all calls in the thread of its scheduler, one at a time, also with the overlap schedule, which launches
    on another stream. The options that would plan two batches at once are refused (`refusals`).

    Attributes:
        states: recurrent layers that draftmark runs; None for a model without any, and for a draft model.

    Raises:
        EngineError: the run is not supported. The error lists all reasons.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        require_served(runner)
        self.facts, self._options = facts_of(runner), Options.read()
        if self.facts.latent:
            use_absorbed_form()
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
        self.max_context_len = self.facts.context_len
        self.kv_index_translator = None
        loaded = choose(self._options.backend, torch.device(self.facts.device).type)
        modes, self.states = modes_of(self.facts), None
        served = None if self.facts.is_draft else served_states(runner.model_config, resolved(runner))
        if served is not None:
            require_served_states(runner)
            self.states = StateLayers(runner, self.facts, served, modes)
        self.attention = LayerAttention(runner, loaded, self.facts, modes, self.states)
        self.needs_cpu_seq_lens = self.attention.needs_host_lengths
        self._batch: ForwardBatch | None = None
        self._comparison = ForwardComparison(
            any(arena.guarded for arena in self.attention.arenas), self.facts.page_size
        )
        self._mask, self._masks = self._new_mask(), self._new_masks()

    # -- preparation before a forward ---------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Reallocate the buffers when SGLang captures batches of more requests than it serves (sglang#25124)."""
        if max_bs > self.attention.geometry.max_reqs:
            self.attention.allocate(max_bs)
            self._mask, self._masks = self._new_mask(), self._new_masks()

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the `seq_lens` of a padding request: 1, because the length includes the request's own row."""
        return 1

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Return the `seq_lens` of a padding request on a CPU. SGLang 0.5.18 and later read it for DP attention."""
        return self.get_cuda_graph_seq_len_fill_value()

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Copy SGLang's lengths and slots into static buffers, and plan the batch on the host.

        SGLang calls it outside the graph: in eager mode, before a capture and before each replay.
        """
        self._comparison.begin()
        if forward_batch.forward_mode.is_idle() or not forward_batch.batch_size:
            self._batch = None
            return
        mode = mode_of(forward_batch.forward_mode)
        req_to_token = self.req_to_token_pool.req_to_token
        if mode is Mode.EXTEND:
            self._batch = extend_batch(self.attention.geometry, forward_batch, req_to_token)
        else:
            self._batch = uniform_batch(
                self.attention, forward_batch, mode, req_to_token, masks=self._masks_of(mode), in_capture=in_capture
            )
        self.attention.plan(self._batch)
        if self.states is not None:
            self.states.prepare(self._batch, forward_batch, in_capture)
        if not in_capture:
            self._comparison.remember(self._batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Compute page table, draft-tree visibility and positions from the copies, and write the backends' metadata.

        Eager mode, capture and replay run the same operations.
        """
        if self._batch is None:
            return
        if self._batch.mode is not Mode.EXTEND:
            write_batch(self.attention, self._batch, self._masks_of(self._batch.mode))
        self.attention.write_metadata(self._batch)
        if self.states is not None:
            self.states.write_metadata()

    # -- attention of one layer ---------------------------------------------------------------------------

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, sinks: Any = None,
        **arguments: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Run one layer's attention in any mode.

        Args:
            save_kv_cache: False when SGLang has already stored K and V in this batch's slots.

        Returns:
            ``[rows, num_qo_heads · head_dim]``; of a latent layer ``[rows, num_qo_heads · value_dim]``.

        Raises:
            NotImplementedError: an argument or the layer's sinks are not supported.
        """
        refuse(arguments, layer.layer_id)
        assert self._batch is not None, "call init_forward_metadata before a forward"
        if not save_kv_cache:
            k = v = None
        return self.attention.forward(layer, q, k, v, self._batch, sinks)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **arguments: Any
    ) -> torch.Tensor:
        """Run one layer's attention in a decode; see `forward_extend`."""
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **arguments)

    # -- tree masks of VERIFY -----------------------------------------------------------------------------

    @property
    def verify_mask(self) -> Any:
        """SGLang's tree mask buffer: D × D bools per request, without the prefix; None unless trees are verified."""
        return self._mask

    def _masks_of(self, mode: Mode) -> TreeMasks | None:
        return self._masks if mode is Mode.VERIFY else None

    def _new_masks(self) -> TreeMasks | None:
        """Allocate the tree masks that CUDA graphs read; None unless this runner verifies trees."""
        if self.facts.is_draft or not self.facts.verifies_trees:
            return None
        return TreeMasks(self.attention.geometry.max_reqs, self.facts.num_draft_tokens, self.facts.device)

    def _new_mask(self) -> Any:
        """Allocate the mask buffer that SGLang writes; None unless this runner verifies trees."""
        masks = self._new_masks()
        if masks is None:
            return None
        from sglang.srt.layers.attention.verify_mask import VerifyMask
        from sglang.srt.speculative.eagle_utils import TreeMaskMode

        return VerifyMask(
            buffer=masks.cells.flatten(), mode=TreeMaskMode.QLEN_ONLY, max_bs=self.attention.geometry.max_reqs
        )
