"""vLLM's runner V1, extended to draft trees. A worker's existing runner object gets `TreeRunner` as a base class."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from draftmark.runtime import commit_round
from draftmark_engines import EngineError

from ..settings import Settings
from .acceptance import ChainMoves, GroupPages, Kept, moved_rows, walk
from .choices import Choice, choose
from .combs import comb, comb_proposer, steps_of
from .step_trees import Parents, StepTrees, set_current_trees, starts_of, trimmed


def with_trees(runner: Any) -> None:
    """Extend a runner object to draft trees. Its class becomes a subclass of `TreeRunner` and of its former class.

    Raises:
        EngineError: the runner's configuration does not support trees.
    """
    if not hasattr(runner, "_prepare_inputs") or not hasattr(runner, "propose_draft_token_ids"):
        raise EngineError("trees need vLLM's runner V1; set VLLM_USE_V2_MODEL_RUNNER=0")
    if runner.use_async_scheduling:
        raise EngineError("trees need the accepted drafts on the host before the next step; set --no-async-scheduling")
    if runner.uses_mrope:
        raise EngineError("the model has M-RoPE positions, which trees do not serve; leave --worker-cls out")
    # The runner's former class stays a base, because vLLM's CPU runner overrides methods of GPUModelRunner.
    runner.__class__ = type(TreeRunner.__name__, (TreeRunner, type(runner)), {})
    runner.begin_trees()


class TreeRunner(GPUModelRunner):  # type: ignore[misc]
    """vLLM's model runner with draft trees. Overridden methods keep vLLM's names, and vLLM calls them."""

    _tree_of: dict[str, Parents | None]
    _trees: StepTrees | None
    _kept: Kept | None
    _comb: Parents | None

    def begin_trees(self) -> None:
        """Initialize the state for trees, once, after vLLM's own constructor.

        Raises:
            EngineError: the configured draft method cannot draft trees.
        """
        self._tree_of, self._trees, self._kept, self._comb = {}, None, None, None
        config = self.speculative_config
        if config is None or config.method == "custom_class":
            return
        if config.method not in ("eagle", "eagle3"):
            raise EngineError(
                f"trees of drafts by {config.method} are not served; use the method eagle3, or custom_class with "
                "the model draftmark_vllm.trees.look_up.LookUpTrees"
            )
        branches = Settings.read(self.vllm_config.additional_config).branches
        steps = steps_of(config.num_speculative_tokens, branches)
        self.drafter.__class__ = comb_proposer(type(self.drafter))
        self.drafter.branches, self.drafter.steps = branches, steps
        self._comb = comb(steps, branches)

    def _prepare_inputs(self, scheduler_output: Any, *given: Any, **more: Any) -> Any:
        """Prepare a step's inputs, then set each row's position to the request's prefix plus the node's depth."""
        found = super()._prepare_inputs(scheduler_output, *given, **more)
        self._trees = self._step_trees(scheduler_output)
        # KV slots stay in row order, as vLLM has computed them. Only positions and masks follow the tree's nodes.
        rows, changes = self._trees.depth_changes()
        if rows:
            at = torch.tensor(rows, device=self.positions.device)
            self.positions[at] += torch.tensor(changes, device=self.positions.device)
        return found

    def _build_attention_metadata(self, *given: Any, **more: Any) -> Any:
        """Build attention metadata as vLLM does, and let the builders read the step's trees meanwhile."""
        with set_current_trees(self._trees):
            return super()._build_attention_metadata(*given, **more)

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        """Walk the trees in place of vLLM's rejection sampler, and move the accepted KV."""
        trees = self._trees
        if logits is None or trees is None:
            return super()._sample(logits, spec_decode_metadata)
        choices = self._choices()
        kept = self._walk(logits, spec_decode_metadata, choices, trees)
        tokens, more = kept.tokens, None
        if None in choices:
            theirs = super()._sample(logits, spec_decode_metadata)
            own = [number for number, one in enumerate(choices) if one is None]
            tokens, more = _joined(tokens, theirs.sampled_token_ids, own), theirs.logprobs_tensors
        self._commit(kept, trees)
        self._kept = kept
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=more)

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        *given: Any,
        **more: Any,
    ) -> Any:
        """Propose drafts after the accepted tokens, with hidden states reordered as for a chain of accepted drafts."""
        order = self._chain_order(len(hidden_states))
        if order is not None:
            hidden_states = hidden_states[order]
            aux_hidden_states = aux_hidden_states and [one[order] for one in aux_hidden_states]
        self._trees = self._kept = None
        step, states = (scheduler_output, sampled_token_ids, sampling_metadata), (hidden_states, sample_hidden_states)
        found = super().propose_draft_token_ids(*step, *states, aux_hidden_states, *given, **more)
        each = getattr(self.drafter, "parents", None) or [self._comb] * len(self.input_batch.req_ids)
        self._tree_of = dict(zip(self.input_batch.req_ids, each, strict=False))
        return found

    def _step_trees(self, scheduler_output: Any) -> StepTrees:
        drafts, found, lens = scheduler_output.scheduled_spec_decode_tokens, [], []
        choices = self._choices()
        for name, choice in zip(self.input_batch.req_ids, choices, strict=True):
            rows, nodes = scheduler_output.num_scheduled_tokens[name], 1 + len(drafts.get(name, ()))
            known = self._tree_of.get(name)
            lens.append(rows)
            # A request for vLLM's own sampler (choice is None) gets no tree: that sampler reads drafts as a chain.
            whole = known is not None and choice is not None and rows == nodes <= len(known)
            found.append(trimmed(known, nodes) if known is not None and whole and nodes > 1 else None)
        return StepTrees(tuple(found), starts_of(lens))

    def _choices(self) -> list[Choice | None]:
        seed = self.model_config.seed or 0
        return [Choice.of(self.requests[one].sampling_params, one, seed) for one in self.input_batch.req_ids]

    def _walk(self, logits: torch.Tensor, metadata: Any, choices: list[Choice | None], trees: StepTrees) -> Kept:
        requests = len(choices)
        counts = [0] * requests if metadata is None else list(metadata.num_draft_tokens)
        ends = trees.starts[1:]
        rows = [end - 1 - n + node for end, n in zip(ends, counts, strict=True) for node in range(n + 1)]
        at = torch.tensor(rows, device=logits.device)
        greedy = Choice()
        each = [one or greedy for one, n in zip(choices, counts, strict=True) for _ in range(n + 1)]
        targets = choose(logits[: len(rows)], each, self.positions[at])
        ids = self.input_ids.gpu[at].tolist()
        first = starts_of([n + 1 for n in counts])
        drafts = [ids[a + 1 : b] for a, b in pairwise(first)]
        return walk(drafts, trees.parents, targets)

    def _commit(self, kept: Kept, trees: StepTrees) -> None:
        """End the round: move KV, tokens and positions of accepted nodes to the rows of a chain. vLLM owns lengths."""
        layers, tables = self.compilation_config.static_forward_context, self.input_batch.block_table
        moves = ChainMoves(kept.paths, trees.starts)
        groups = [
            GroupPages([_pages(layers[name]) for name in group.layer_names], tables[number].slot_mapping.gpu)
            for number, group in enumerate(self.kv_cache_config.kv_cache_groups)
        ]
        commit_round(None, kept.result, None, None, kv=[(moves, group) for group in groups])
        if self._comb is None:
            return
        sources, targets = moves.sources, moves.targets
        rows, changes = trees.depth_changes()
        if rows:
            at = torch.tensor(rows, device=self.positions.device)
            self.positions[at] -= torch.tensor(changes, device=self.positions.device)
        if sources:
            ids = self.input_ids.gpu
            old, new = (torch.tensor(one, device=ids.device) for one in (sources, targets))
            ids[new] = ids[old]

    def _chain_order(self, rows: int) -> torch.Tensor | None:
        """Return the order that moves accepted nodes' hidden states to a chain's rows; None if nothing moves."""
        if self._kept is None or self._trees is None or self._comb is None:
            return None
        order = list(range(rows))
        for source, target in zip(*moved_rows(self._kept.paths, self._trees.starts), strict=True):
            order[target] = source
        return torch.tensor(order, device=self.positions.device)


def _pages(layer: Any) -> torch.Tensor:
    """Return one layer's KV memory."""
    cache = layer.kv_cache
    found: torch.Tensor = cache[0] if isinstance(cache, list) else cache
    return found


def _joined(ours: torch.Tensor, theirs: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Return `ours` with the rows of `theirs` (vLLM's sampler) at `rows`. Each row has -1 after its last token."""
    width = max(ours.shape[1], theirs.shape[1])
    found = ours.new_full((len(ours), width), -1)
    found[:, : ours.shape[1]] = ours
    found[rows] = -1
    found[rows, : theirs.shape[1]] = theirs[rows].to(found.dtype)
    return found
