"""SGLang's `draft_forward`, captured once in draftmark's `RecordedGraph` and replayed beside every eager round.

The split is the one of SGLang's CUDA graph runner: static inputs padded to a captured size, `out_graph` before,
`in_graph` and the forward inside. So what would be baked into a CUDA graph is baked in here, on a laptop.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from scheduler import on_a_cpu

from draftmark.runtime import GraphKey, Program, graph_state_for
from draftmark_sglang.in_process import run_until_done, submit

PADDED = 4


class RecordedRounds:
    """Takes the place of `EagleDraftWorker.draft_forward`: the eager result, and the number of replays that differed.

    Attributes:
        rounds, different: replays in all, and those of which any output was not the eager one's.
        requests: how many requests each replayed round had.
    """

    def __init__(self, original: Any) -> None:
        self._original, self._graphs = original, graph_state_for(torch.device("cpu"))
        self._static: Any = None
        self.rounds = self.different = 0
        self.requests: list[int] = []

    def __call__(self, worker: Any, forward_batch: Any) -> Any:
        """An eager round, and the same round replayed."""
        if self._static is None:
            self._capture(worker, forward_batch)
        given = self._inputs(forward_batch)
        eager = self._original(worker, forward_batch)
        raw = forward_batch.batch_size
        self._fill(given, raw)
        worker.draft_attn_backend.init_forward_metadata_out_graph(self._static)
        replayed = self._graphs.replay(GraphKey(Program.DRAFT, PADDED))
        same = all(torch.equal(a, b[:raw]) for a, b in zip(eager[:3], replayed[:3], strict=True))
        self.rounds, self.different = self.rounds + 1, self.different + (not same)
        self.requests.append(raw)
        return eager

    @staticmethod
    def _inputs(batch: Any) -> list[torch.Tensor]:
        spec = batch.spec_info
        tensors = (batch.req_pool_indices, batch.seq_lens, batch.positions, batch.out_cache_loc)
        return [one.clone() for one in (*tensors, spec.topk_p, spec.topk_index, spec.hidden_states)]

    def _fill(self, given: list[torch.Tensor], raw: int) -> None:
        for static, one in zip(self._tensors, given, strict=True):
            static.zero_()
            static[: len(one)].copy_(one)
        self._static.seq_lens[raw:] = 1

    def _capture(self, worker: Any, batch: Any) -> None:
        given = self._inputs(batch)
        self._tensors = [
            torch.zeros(len(one) // batch.batch_size * PADDED, *one.shape[1:], dtype=one.dtype) for one in given
        ]
        static, spec = copy.copy(batch), copy.copy(batch.spec_info)
        static.req_pool_indices, static.seq_lens, static.positions, static.out_cache_loc = self._tensors[:4]
        spec.topk_p, spec.topk_index, spec.hidden_states = self._tensors[4:]
        static.spec_info, static.batch_size, static.seq_lens_cpu, static.seq_lens_sum = spec, PADDED, None, None
        static.seq_lens.fill_(1)
        self._static = static
        container = worker.draft_attn_backend
        container.init_forward_metadata_out_graph(static, in_capture=True)

        def once() -> Any:
            slots, hidden = static.out_cache_loc, spec.hidden_states
            container.init_forward_metadata_in_graph(static)
            made = self._original(worker, static)
            static.out_cache_loc, spec.hidden_states = slots, hidden
            static.positions.sub_(len(container.attn_backends))
            return made

        self._graphs.capture(GraphKey(Program.DRAFT, PADDED), once)
        container.init_forward_metadata(batch)


def recorded(prompts: list[list[int]], max_new_tokens: int, **arguments: Any) -> dict[str, Any]:
    """Serve prompts with every draft round replayed as well."""
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

    rounds = RecordedRounds(EagleDraftWorker.draft_forward)
    EagleDraftWorker.draft_forward = lambda worker, batch: rounds(worker, batch)
    scheduler = on_a_cpu(**arguments)
    requests = submit(scheduler, prompts, max_new_tokens)
    run_until_done(scheduler, requests)
    return {
        "texts": [list(request.output_ids)[:max_new_tokens] for request in requests],
        "rounds": rounds.rounds,
        "different": rounds.different,
        "requests": sorted(set(rounds.requests)),
    }
