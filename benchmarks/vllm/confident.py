"""A random draft head that is sure of its drafts, and the costs and counts of adaptive verification.

vLLM's dummy weights give every token the same chance. Adaptive verification then expects that no draft is accepted, and
verifies none, so it never learns how many are.
"""

from __future__ import annotations

from typing import Any

import torch

from .engines import Engine

SPREAD = 0.15
"""Standard deviation of the output matrix: with 4,096 features logits differ by about ten."""


def make_confident(worker: Any) -> None:
    """Fill norms with ones and output matrices with random numbers, in place, in the models of vLLM's runner V2."""
    runner = worker.model_runner
    for model in (runner.model, runner.speculator.model):
        generator = torch.Generator(device=next(model.parameters()).device).manual_seed(0)
        for name, one in model.named_parameters():
            if one.dim() == 1 and one.is_floating_point():
                one.data.fill_(1)
            elif name.endswith("lm_head.weight"):
                one.data.normal_(0, SPREAD, generator=generator)


def settle(llm: Any, engine: Engine) -> None:
    """Count the drafts that adaptive verification verifies, and set its costs if the engine has a cost of a row."""
    if engine.adaptive:
        llm.collective_rpc(count_drafts)
    if engine.row_cost is not None:
        llm.collective_rpc(set_row_cost, args=(engine.row_cost,))


def measure_again(llm: Any, engine: Engine) -> dict[str, Any]:
    """Let vLLM measure the costs of steps again. It measures at its start, while other engines use the GPU too."""
    if not engine.adaptive or engine.row_cost is not None:
        return {}
    (found,) = llm.collective_rpc(measure_costs)
    return {"costs": found}


def set_row_cost(worker: Any, row_cost: float) -> None:
    """Replace vLLM's measured costs by a table: a step costs one, and `row_cost` more for each row that it verifies."""
    manager = worker.model_runner.adaptive_verification
    most = manager.req_states.max_num_batched_tokens
    manager.set_cost_curves([(1, 0.0)], [(rows, 1.0 + row_cost * rows) for rows in range(1, most + 1)])


def measure_costs(worker: Any) -> str:
    """Measure the costs of steps as vLLM does at its start (`capture_model` of runner V2); return "" or an error.

    After an error the costs are those of the start.
    """
    runner = worker.model_runner
    manager = runner.adaptive_verification
    try:
        with torch.inference_mode(), runner.step_timing.collect() as timings:
            for batch in manager.batches_to_profile(runner.cudagraph_manager.captured_token_counts()):
                runner._dummy_run(**batch)
        manager.set_initial_cost_curves(timings)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def count_drafts(worker: Any) -> None:
    """Count the scheduled drafts of all steps from now on, and those that adaptive verification keeps."""
    manager = worker.model_runner.adaptive_verification
    usual, counts = manager.get_num_tokens, [0, 0]

    def get_num_tokens(rows: dict[str, int], drafts: dict[str, list[int]]) -> int:
        kept: int = usual(rows, drafts)
        scheduled = sum(map(len, drafts.values()))
        counts[0] += scheduled
        counts[1] += scheduled - (sum(rows.values()) - kept)
        return kept

    manager.get_num_tokens, manager.counted_drafts = get_num_tokens, counts


def counted_drafts(worker: Any) -> tuple[int, int]:
    """Return the scheduled and the verified drafts of all steps since `count_drafts`."""
    scheduled, verified = worker.model_runner.adaptive_verification.counted_drafts
    return scheduled, verified


class Verified:
    """Share of the drafts that an engine with adaptive verification verifies from now on.

    Args:
        llm: vLLM's `LLM`, after `settle`.
    """

    def __init__(self, llm: Any, engine: Engine) -> None:
        self._llm = llm if engine.adaptive else None
        self._before = self._counts()

    def _counts(self) -> tuple[int, int]:
        if self._llm is None:
            return 0, 0
        (found,) = self._llm.collective_rpc(counted_drafts)
        return found[0], found[1]

    def share(self) -> dict[str, float]:
        """Return ``verified``: verified drafts divided by scheduled ones; nothing for other engines."""
        (scheduled, verified), (scheduled_before, verified_before) = self._counts(), self._before
        if scheduled == scheduled_before:
            return {}
        return {"verified": round((verified - verified_before) / (scheduled - scheduled_before), 3)}
