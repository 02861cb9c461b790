"""Attention backends of a draft model's steps. SGLang plans all steps together and runs them in one CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from draftmark import Mode
from draftmark.runtime import ForwardBatch
from draftmark_engines import EngineError, choose

from .attention import LayerAttention
from .batches import host_lengths
from .facts import facts_of
from .latent import use_absorbed_form
from .options import Ancestors, Options
from .refusals import refuse, require_served
from .trees import write_parents_by_branch, write_parents_of_step


class ActiveRound:
    """Reference of the hooks to the running draft steps. A process runs one draft model, one step at a time.

    Attributes:
        steps: the container that was created last or began a round last; None if draftmark runs no draft model.
    """

    steps: DraftSteps | None = None


ACTIVE_ROUND = ActiveRound()


class DraftSteps:
    """Holds one backend for each of a draft model's `num_steps` - 1 forwards. SGLang has no base class for it.

    Only these steps read the draft tokens' KV, because the draft extend after a round overwrites all of it. So branch t
    of step s stores its KV at position L + topk · s + t, where L is the committed length. SGLang reserves at least
    topk · num_steps positions after L. SGLang's own slots (`out_cache_loc`, whole pages for each branch) are not used.

    Attributes:
        attn_backends: one backend for each step with a forward of the draft model.
        needs_cpu_seq_lens: whether SGLang must copy lengths to the host.

    Raises:
        EngineError: the run is not supported.
    """

    def __init__(self, runner: Any, topk: int, num_steps: int) -> None:
        require_served(runner)
        self.facts, self._options = facts_of(runner), Options.read()
        if self.facts.latent:
            use_absorbed_form()
        if (topk, num_steps) != (self.facts.topk, self.facts.num_steps):
            raise EngineError(
                f"SGLang's draft worker uses {num_steps} steps of topk {topk}, but the server arguments state "
                f"{self.facts.num_steps} steps of topk {self.facts.topk}; turn adaptive speculation off"
            )
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
        self.max_context_len, self.kv_index_translator = self.facts.context_len, None
        loaded = choose(self._options.backend, torch.device(self.facts.device).type)
        self.attention = LayerAttention(runner, loaded, self.facts, (Mode.DRAFT,))
        self.needs_cpu_seq_lens = self.attention.needs_host_lengths
        self.attn_backends = [DraftStep(self, step) for step in range(num_steps - 1)]
        self._batches: list[ForwardBatch] = []
        self._written_step = -1
        self._allocate()
        ACTIVE_ROUND.steps = self

    @classmethod
    def of(cls, factory: Any) -> DraftSteps:
        """Create the draft steps for SGLang's `DraftBackendFactory`."""
        return cls(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)

    def _allocate(self) -> None:
        geometry = self.attention.geometry
        shape = (geometry.max_reqs, geometry.max_draft_tail)
        self._parents = torch.full(shape, -1, dtype=torch.int64, device=self.facts.device)

    # -- methods that SGLang calls ------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a draft round in eager mode: copy SGLang's lengths, plan all steps, then write the page table."""
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """See `DraftmarkBackend.init_cuda_graph_state`."""
        if max_bs > self.attention.geometry.max_reqs:
            self.attention.allocate(max_bs)
            self._allocate()

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Copy lengths and slots once for all steps, and plan each step on the host."""
        requests, tree = forward_batch.batch_size, self.facts.topk > 1
        host = host_lengths(forward_batch, self.attention.geometry, 0, in_capture)
        self._batches = [
            self.attention.uniform(Mode.DRAFT, step, requests, host, tree=tree)
            for step in range(len(self.attn_backends))
        ]
        # With num_steps 1 there is no batch here, because the draft model then runs in draft extend only.
        for batch in self._batches[:1]:
            self.attention.prefixes.copy(batch, forward_batch, 0, self.req_to_token_pool.req_to_token)
        for batch in self._batches:
            self.attention.plan(batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Begin a round: write lengths and the page table. Each step writes its metadata later, in `begin`."""
        self._written_step = -1
        for batch in self._batches[:1]:
            self.attention.prefixes.write(batch, 0)
        ACTIVE_ROUND.steps = self

    # -- methods for the hook and the step backends -------------------------------------------------------

    def record_parents(self, step: int, choice: torch.Tensor) -> None:
        """Record the parents of a step's new branches; a hook calls it after `select_top_k_tokens`, inside the graph.

        Args:
            choice: int64 ``[R, topk]``, the selected candidates (`tree_info[2]`).
        """
        topk, requests = self.facts.topk, choice.shape[0]
        if topk == 1 or not 0 < step < len(self.attn_backends):
            return
        parents = self._parents[:requests, topk * step : topk * (step + 1)]
        if self._options.ancestors is Ancestors.TRUE:
            write_parents_of_step(parents, choice, topk)
        else:
            write_parents_by_branch(parents, step)

    def begin(self, step: int) -> ForwardBatch:
        """Return a step's batch. The step's first call writes the draft tree and the backends' metadata.

        Earlier is impossible: the tree's parents are known only after the previous step selected its tokens.
        """
        batch = self._batches[step]
        if self._written_step != step:
            if self.facts.topk > 1:
                tail = batch.tail_lens[0]
                self.attention.tree_ops.write_tail(batch, self._parents[: batch.padded_reqs, :tail])
            else:
                self.attention.tree_ops.write_tail(batch)
            self.attention.write_metadata(batch)
            self._written_step = step
        return batch


class DraftStep(AttentionBackend):  # type: ignore[misc]  # sglang has no types here
    """Backend of one draft step; SGLang makes it current while that step runs."""

    def __init__(self, steps: DraftSteps, step: int) -> None:
        super().__init__()
        self._steps, self._step = steps, step
        self.req_to_token_pool, self.token_to_kv_pool = steps.req_to_token_pool, steps.token_to_kv_pool
        self.max_context_len, self.needs_cpu_seq_lens = steps.max_context_len, steps.needs_cpu_seq_lens
        self.kv_index_translator = None

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """See `DraftmarkBackend.get_cuda_graph_seq_len_fill_value`."""
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Do nothing, because `DraftSteps` prepares all steps of a round together."""

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, sinks: Any = None,
        **arguments: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Run one layer's attention in this draft step.

        Raises:
            NotImplementedError: an argument is not supported, or SGLang has stored a tree's K and V at its own slots.
        """
        refuse(arguments, layer.layer_id)
        if not save_kv_cache and k is not None and self._steps.facts.topk > 1:
            raise NotImplementedError(
                f"layer {layer.layer_id}: the draft model stores KV in a fused kernel at SGLang's own slots, but draft "
                "trees use other slots here; use --speculative-eagle-topk 1, or one of SGLang's own backends"
            )
        if not save_kv_cache:
            k = v = None
        return self._steps.attention.forward(layer, q, k, v, self._steps.begin(self._step), sinks)

    forward_extend = forward_decode
