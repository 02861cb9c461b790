"""The steps of a draft model: SGLang plans all of them at once and runs them one after the other, in one graph."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from draftmark import Mode
from draftmark.runtime import ForwardBatch
from draftmark_engines import EngineError, choose

from .arguments import refuse
from .attention import LayerAttention
from .batches import host_lengths
from .draft_round import ACTIVE
from .facts import facts_of
from .options import Ancestors, Options
from .refusals import require_served
from .trees import write_parents_by_branch, write_parents_of_step


class DraftSteps:
    """SGLang's container of `num_steps` - 1 backends. It has no base class there.

    Draft KV is private to these steps: all of it is overwritten when the draft model takes over the accepted tokens.
    So step s, branch t writes position L + topk · s + t, not the slots that SGLang chose for whole pages a branch
    (`out_cache_loc` is not read), within what SGLang reserves: at least topk · num_steps positions.

    Attributes:
        attn_backends: one for each step's forward.
        needs_cpu_seq_lens: whether SGLang must bring lengths to the host.
    """

    def __init__(self, runner: Any, topk: int, num_steps: int) -> None:
        require_served(runner)
        self.facts, self._options = facts_of(runner), Options.read()
        if (topk, num_steps) != (self.facts.topk, self.facts.num_steps):
            raise EngineError(
                f"the draft model drafts {num_steps} steps of {topk}, but SGLang's arguments say "
                f"{self.facts.num_steps} of {self.facts.topk}; adaptive speculation is not served"
            )
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
        self.max_context_len, self.kv_index_translator = self.facts.context_len, None
        loaded = choose(self._options.backend, torch.device(self.facts.device).type)
        self.attention = LayerAttention(runner, loaded, self.facts, (Mode.DRAFT,))
        self.needs_cpu_seq_lens = self.attention.needs_host_lengths
        self.attn_backends = [DraftStep(self, step) for step in range(num_steps - 1)]
        self._batches: list[ForwardBatch] = []
        self._begun = -1
        self._allocate()
        ACTIVE.steps = self

    def _allocate(self) -> None:
        geometry = self.attention.geometry
        shape = (geometry.max_reqs, geometry.max_draft_tail)
        self._parents = torch.full(shape, -1, dtype=torch.int64, device=self.facts.device)

    # -- what SGLang calls --------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """An eager round."""
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """See `DraftmarkBackend.init_cuda_graph_state`."""
        if max_bs > self.attention.geometry.max_reqs:
            self.attention.open(max_bs)
            self._allocate()

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Lengths and page tables, once for all steps; and each step's plan, the longest last."""
        requests, tree = forward_batch.batch_size, self.facts.topk > 1
        host = host_lengths(forward_batch, self.attention.geometry, 0, in_capture)
        self._batches = [
            self.attention.uniform(Mode.DRAFT, step, requests, host, tree=tree)
            for step in range(len(self.attn_backends))
        ]
        for batch in self._batches[:1]:  # one draft step needs no forward of the draft model behind the first
            self.attention.prefixes.copy(batch, forward_batch, 0, self.req_to_token_pool.req_to_token)
        for batch in self._batches:
            self.attention.plan(batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """A round begins: no step's metadata is written yet."""
        self._begun = -1
        for batch in self._batches[:1]:
            self.attention.prefixes.write(batch, 0)
        ACTIVE.steps = self

    # -- during a round -----------------------------------------------------------------------------------

    def note_parents(self, step: int, choice: torch.Tensor) -> None:
        """Whom the tokens of a step continue; told by the hook on `select_top_k_tokens`, in the captured region."""
        topk, requests = self.facts.topk, choice.shape[0]
        if topk == 1 or not 0 < step < len(self.attn_backends):
            return
        parents = self._parents[:requests, topk * step : topk * (step + 1)]
        if self._options.ancestors is Ancestors.TRUE:
            write_parents_of_step(parents, choice, topk)
        else:
            write_parents_by_branch(parents, step)

    def begin(self, step: int) -> ForwardBatch:
        """The batch of a step; its tail and metadata are written at its first layer, when parents are known."""
        batch = self._batches[step]
        if self._begun != step:
            if self.facts.topk > 1:
                tail = batch.tail_lens[0]
                self.attention.tree_ops.write_tail(batch, self._parents[: batch.padded_reqs, :tail])
            else:
                self.attention.tree_ops.write_tail(batch)
            self.attention.write_metadata(batch)
            self._begun = step
        return batch


class DraftStep(AttentionBackend):  # type: ignore[misc]  # sglang has no types here
    """One step's backend: SGLang makes it the current one while it runs that step."""

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
        """Nothing: the container has planned the round."""

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, sinks: Any = None,
        **arguments: Any,
    ) -> torch.Tensor:  # fmt: skip
        """A step's attention.

        Raises:
            NotImplementedError: SGLang has stored K and V itself, at slots that are not this layout's.
        """
        refuse(arguments, layer.layer_id)
        if not save_kv_cache and k is not None and self._steps.facts.topk > 1:
            raise NotImplementedError(
                f"layer {layer.layer_id}: the draft model stores its KV in a fused kernel, at SGLang's own slots, "
                "which trees do not have here; use --speculative-eagle-topk 1, or one of SGLang's own backends"
            )
        if not save_kv_cache:
            k = v = None
        return self._steps.attention.forward(layer, q, k, v, self._steps.begin(self._step), sinks)

    forward_extend = forward_decode
