"""Everything that SGLang's backends are asked, as items of `draftmark judge`."""

from __future__ import annotations

import importlib.metadata as md
import importlib.util
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

from draftmark import Mode
from draftmark_contract.judge.item import Item, NotAsked

from .importing import ready
from .setups import SETUPS, WINDOW, Setup, eager_scenes, replayed_modes

AS_GRAPH = "metadata are prepared as for a replay, and the kernels run on what the capture bound"
AS_STORES = "attention stores its rows, and nothing else changes"
AS_WALL = "what the backend allocates has guard words around it, and all requests are at the context's end"
Question = tuple[str, str, str, tuple[Any, ...], str]
"""A rule, a case, a function of `questions`, what it is given, and how the rule is put."""
NEAR = 4
"""SGLang ends a request two tokens below the context; of those, a round has one to come and one pending."""


@cache
def _not_run() -> str:
    """Why this release's scheduler is not run; "" where it is."""
    installed = md.version("sglang")
    known = importlib.util.find_spec("sglang.srt.runtime_context") is not None
    return "" if known else f"the scheduler of {installed} is not run here; of 0.5.17 and later it is"


def served_items(target: str, device: str) -> list[Item]:
    """Of a backend that runs on a running scheduler's pools; each setup's process ends when the next one's begins."""
    from .station import Station

    made: list[Item] = []
    stations = {name: Station(name, target, device) for name in SETUPS}

    def ask(setup: str, question: str, *given: Any) -> None:
        if why := _not_run():
            raise NotAsked(why)
        for name, station in stations.items():
            if name != setup:
                station.end()
        stations[setup].ask(question, *given)

    for setup in SETUPS.values():
        for rule, case, question, given, asks in _questions(setup):
            made.append(Item(rule, f"{setup.name}-{case}", partial(ask, setup.name, question, *given), asks))
    return made


def _questions(setup: Setup) -> Iterator[Question]:
    scenes = eager_scenes(setup)
    for scene in scenes:
        yield "numerics.match_float64", scene.name, "rows", (scene.name,), ""
    for scene in scenes:
        if scene.window < 0 and not scene.soft_cap and (scene.mode is not Mode.DRAFT or setup.page_size > 1):
            yield "purity.each_call_writes_its_own", scene.name, "stores", (scene.name,), AS_STORES
    for name in ("decode", "verify-random", "verify-chain", "draft-extend"):
        if any(scene.name == name for scene in scenes):
            yield "lengths.of_any_kind_give_one_result", name, "unknown_lengths", (name,), "the host knows no lengths"
    yield "history.equals_a_fresh_state", "all-modes", "history", (), ""
    yield "repeats.give_the_same_bits", "decode", "same_bits", ("decode",), ""
    for mode in replayed_modes(setup):
        yield from _of_graphs(mode) if mode is not Mode.DRAFT else _of_draft_graphs(setup)
    if setup.speculates:
        yield "sizing.covers", "served", "served", (), "the scheduler serves one request, to the context's end"
        for mode in (Mode.VERIFY, Mode.DRAFT):
            yield "guards.survive_every_step", mode.value, "wall", (mode.value, NEAR, False), AS_WALL


def _of_graphs(mode: Mode) -> Iterator[Question]:
    yield "graphs.captured_run_is_right", mode.value, "captured", (mode.value, -1), AS_GRAPH
    yield "graphs.replay_equals_eager", mode.value, "replays", (mode.value, -1), AS_GRAPH
    yield "graphs.replay_equals_eager", f"{mode.value}-window", "replays", (mode.value, WINDOW), AS_GRAPH
    yield "padding.changes_no_live_byte", mode.value, "padding", (mode.value,), AS_GRAPH
    yield "guards.survive_every_step", f"{mode.value}-graph", "wall", (mode.value, NEAR, True), AS_WALL


def _of_draft_graphs(setup: Setup) -> Iterator[Question]:
    """Few, and at one page size: Triton's interpreter takes half a minute for a round of three branches."""
    if setup.page_size == 1:
        mode = Mode.DRAFT
        yield "graphs.captured_run_is_right", mode.value, "captured", (mode.value, -1), AS_GRAPH
        yield "graphs.replay_equals_eager", mode.value, "replays", (mode.value, -1), AS_GRAPH


def probe_items(target: str) -> list[Item]:
    """Of a backend whose own metadata and sizes are judged without its kernels."""

    def item(rule: str, case: str, module: str, function: str, *given: Any, **named: Any) -> Item:
        def run() -> None:
            import importlib

            ready("cpu")
            getattr(importlib.import_module(f".probes.{module}", __package__), function)(*given, **named)

        return Item(rule, case, run, AS_PROBE)

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
        "trtllm_mha": [
            item("graphs.captured_run_is_right", "draft", "trtllm_tables", "check_capture"),
            item("sizing.covers", "verify-end", "trtllm_tables", "check_width"),
        ],
        "ascend": [item("sizing.covers", "verify-end", "block_tables", "check_ascend")],
        "ngram": [item("sizing.covers", "next-verify", "verify_lengths", "check")],
    }[target]


AS_PROBE = "the class's own methods fill its own buffers on a CPU, and are compared with integers"
AT_END = "sglang#29695"
