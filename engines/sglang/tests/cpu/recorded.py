"""Capture of SGLang's draft rounds on a CPU, in draftmark's emulated CUDA graph (`RecordedGraph`), and their replay.

As in SGLang's CUDA graph runner, inputs are static and padded to a captured size. `init_forward_metadata_out_graph`
runs before each replay; `init_forward_metadata_in_graph` and the forward are captured. So a value that a CUDA graph
would keep from the capture is kept here too.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from scheduler import on_a_cpu

from draftmark.runtime import GraphKey, Program, graph_state_for
from draftmark_sglang_judge.in_process import run_until_done, submit

PADDED = 4


class RecordedRounds:
    """Replaces `EagleDraftWorker.draft_forward`: replays each draft round, compares, and returns the eager result.

    Attributes:
        rounds: number of replays.
        different: number of replays with an output that differs from the eager round.
        requests: number of requests of each replayed round.
    """

    def __init__(self, original: Any) -> None:
        self._original, self._graphs = original, graph_state_for(torch.device("cpu"))
        self._static: Any = None
        self.rounds = self.different = 0
        self.requests: list[int] = []

    def __call__(self, worker: Any, forward_batch: Any) -> Any:
        """Run a round in eager mode, replay it, compare the outputs, and return the eager ones."""
        if self._static is None:
            self._capture(worker, forward_batch)
        inputs = self._inputs(forward_batch)
        eager = self._original(worker, forward_batch)
        raw = forward_batch.batch_size
        self._fill(inputs, raw)
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

    def _fill(self, inputs: list[torch.Tensor], raw: int) -> None:
        for static, one in zip(self._tensors, inputs, strict=True):
            static.zero_()
            static[: len(one)].copy_(one)
        self._static.seq_lens[raw:] = 1

    def _capture(self, worker: Any, batch: Any) -> None:
        inputs = self._inputs(batch)
        self._tensors = [
            torch.zeros(len(one) // batch.batch_size * PADDED, *one.shape[1:], dtype=one.dtype) for one in inputs
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
    """Serve prompts and replay every draft round.

    Return the output tokens, the number of rounds, the number of replays that differ from eager mode, and batch sizes.
    """
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
