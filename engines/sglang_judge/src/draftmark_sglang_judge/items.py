"""Items (checks that are reported one by one) of `draftmark judge` for SGLang's backends."""

from __future__ import annotations

import importlib.metadata as md
import importlib.util
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from draftmark import Mode
from draftmark_contract.check import Unjudged
from draftmark_contract.runner.item import Item, item_of

from .importing import prepare_imports
from .setups import MLA, SETUPS, WINDOW, Setup, eager_scenes, replayed_modes

AS_GRAPH = "metadata is prepared as for a replay, and the kernels read the tensors of the capture"
AS_STORES = "attention stores its rows, and no other slot changes"
AS_CONTEXT_END = "every tensor that the backend allocates has guard words, and all requests are at the context's end"
Question = tuple[str, str, str, tuple[Any, ...], str]
"""(rule, case, function of `questions`, its arguments, sentence about how the rule is checked)."""
NEAR = 4
"""Tokens from a request's longest length to the context's end.

SGLang ends a request 2 tokens below the context, and 2 further tokens are in flight: one pending, one of the round.
"""


@cache
def _reason_not_run() -> str:
    """Return the reason why this release's scheduler is not run; "" if it is run."""
    installed = md.version("sglang")
    known = importlib.util.find_spec("sglang.srt.runtime_context") is not None
    return "" if known else f"the judge runs the scheduler of SGLang 0.5.17 and later, and this is {installed}"


def served_items(target: str, device: str, outside: bool = False) -> list[Item]:
    """Return the items of a backend that runs in SGLang's scheduler.

    Each setup (server arguments) has its own process, and only one of these processes runs at a time.

    Args:
        outside: True for a backend from outside of SGLang.
    """
    from .scheduler_process import SchedulerProcess

    made: list[Item] = []
    processes = {name: SchedulerProcess(name, target, device, outside=outside) for name in SETUPS}

    def ask(setup: str, question: str, *arguments: Any) -> None:
        if why := _reason_not_run():
            raise Unjudged(why)
        for name, process in processes.items():
            if name != setup:
                process.end()
        processes[setup].ask(question, *arguments)

    for setup in SETUPS.values():
        for rule, case, question, arguments, asks in _questions(setup, target):
            made.append(item_of(rule, f"{setup.name}-{case}", partial(ask, setup.name, question, *arguments), asks))
    return made


def _questions(setup: Setup, target: str) -> Iterator[Question]:
    scenes = eager_scenes(setup, target)
    for scene in scenes:
        yield "numerics.match_float64", scene.name, "rows", (scene.name,), ""
    for scene in scenes:
        if scene.window < 0 and not scene.soft_cap and (scene.mode is not Mode.DRAFT or setup.page_size > 1):
            yield "purity.each_call_writes_its_own", scene.name, "stores", (scene.name,), AS_STORES
    for name in ("decode", "verify-random", "verify-chain", "draft-extend"):
        if any(scene.name == name for scene in scenes):
            yield "lengths.of_any_kind_give_one_result", name, "unknown_lengths", (name,), "the host has no lengths"
    yield "history.equals_a_fresh_state", "all-modes", "history", (), ""
    yield "repeats.give_the_same_bits", "decode", "same_bits", ("decode",), ""
    for mode in replayed_modes(setup):
        yield from _graph_questions(mode, target) if mode is not Mode.DRAFT else _draft_graph_questions(setup)
    if setup.speculates:
        yield "sizing.covers", "served", "served", (), "the scheduler serves one request up to the context's end"
        for mode in (Mode.VERIFY, Mode.DRAFT):
            yield "guards.survive_every_step", mode.value, "context_end", (mode.value, NEAR, False), AS_CONTEXT_END


def _graph_questions(mode: Mode, target: str) -> Iterator[Question]:
    yield "graphs.captured_run_is_right", mode.value, "captured", (mode.value, -1), AS_GRAPH
    yield "graphs.replay_equals_eager", mode.value, "replays", (mode.value, -1), AS_GRAPH
    if target not in MLA:
        yield "graphs.replay_equals_eager", f"{mode.value}-window", "replays", (mode.value, WINDOW), AS_GRAPH
    yield "padding.changes_no_live_byte", mode.value, "padding", (mode.value,), AS_GRAPH
    yield "guards.survive_every_step", f"{mode.value}-graph", "context_end", (mode.value, NEAR, True), AS_CONTEXT_END


def _draft_graph_questions(setup: Setup) -> Iterator[Question]:
    """Yield checks of captured draft rounds for page size 1 only: Triton's interpreter needs 30 s for a round."""
    if setup.page_size == 1:
        mode = Mode.DRAFT
        yield "graphs.captured_run_is_right", mode.value, "captured", (mode.value, -1), AS_GRAPH
        yield "graphs.replay_equals_eager", mode.value, "replays", (mode.value, -1), AS_GRAPH


def _probe(module: str, function: str, *arguments: Any, **named: Any) -> Callable[[], None]:
    """Return a call of a function of `probes`. SGLang is imported when it runs."""

    def run() -> None:
        import importlib

        prepare_imports("cpu")
        getattr(importlib.import_module(f".probes.{module}", __package__), function)(*arguments, **named)

    return run


def probe_items(target: str) -> list[Item]:
    """Return the items that check a backend's metadata and sizes without its kernels."""

    def item(rule: str, case: str, module: str, function: str, *arguments: Any, **named: Any) -> Item:
        return item_of(rule, case, _probe(module, function, *arguments, **named), AS_PROBE)

    if target in ("flashinfer", "flashinfer_mla", "triton"):
        from .probes.lengths import AT_THE_END, STEPS_AT_THE_END

        bug = "sglang#27460" if target == "flashinfer_mla" else "sglang#27338"
        found = [item("sizing.covers", f"draft-topk{k}", "draft_indices", "check", target, k, bug=bug) for k in (1, 4)]
        found.append(
            item(
                "sizing.covers",
                "draft-topk4-end",
                "draft_indices",
                "check",
                target,
                4,
                AT_THE_END,
                STEPS_AT_THE_END,
                bug=AT_END,
            )
        )
        if target == "triton":
            found.append(item("sizing.covers", "verify-mask", "block_tables", "check_verify_mask"))
        return found
    return {
        "fa3_mla": [
            item_of(RULE_OF_ROWS, f"verify-tree-page{size}", _probe("latent_trees", "check", size), AS_CALLS)
            for size in (1, 16, 64)
        ],
        "trtllm_mha": [
            item("graphs.captured_run_is_right", "draft", "trtllm_tables", "check_capture"),
            item("sizing.covers", "verify-end", "trtllm_tables", "check_width"),
        ],
        "ascend": [item("sizing.covers", "verify-end", "block_tables", "check_ascend")],
        "ngram": [item("sizing.covers", "next-verify", "verify_lengths", "check")],
    }[target]


RULE_OF_ROWS = "numerics.match_float64"
AS_CALLS = "the class's own metadata and calls run on a CPU with stand-ins for FlashAttention's kernels"
AS_PROBE = "the class's own methods fill its own buffers on a CPU, and the result is compared with integers"
AT_END = "sglang#29695"
