"""Checks of several layers in one forward: each has its own cache, scales and rows, and shapes may differ."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from draftmark.geometry import Geometry
from draftmark.graphs import GraphKey

from ..behaviour import Fixture, behaviour
from ..cases.forward_sets import extends, programs
from ..cases.forwards import ForwardCase, uniform
from ..cases.geometries import behaviours
from ..cases.graph_rounds import LARGE, MODES, captured, programs_of, replays
from ..check import Case
from ..oracle.formulas import max_requests

if TYPE_CHECKING:
    from ..harness.layer_harness import LayerHarness

SINCE = (1, 3)
Shapes = tuple[Geometry, ...]


def _models() -> dict[str, Shapes]:
    """Return the layer shapes of several models: equal layers, fp8 KV, and window layers mixed with full attention."""
    known = behaviours()
    small, large = known["all-modes"], known["all-few-graphs"]
    one_head = {"num_qo_heads": 2, "num_kv_heads": 1}
    return {
        "alike": (small,),
        "alike-page128": (large,),
        "kv8": (_other(known["all-kv8"], **one_head),),
        "window-and-full": (_other(small, window_left=7, logits_soft_cap=30.0, **one_head), _other(small, **one_head)),
        "two-heads-page128": (large, _other(large, num_qo_heads=8, num_kv_heads=2)),
    }


def _other(geometry: Geometry, **change: object) -> Geometry:
    return replace(geometry, attention=replace(geometry.attention, **change))  # type: ignore[arg-type]


def _eager() -> list[Case]:
    found = []
    for name, shapes in _models().items():
        geometry, size = shapes[0], shapes[0].attention.page_size
        for mode, step in dict(programs(geometry)).items():
            plans = (((size + 1, 3, 40), max_requests(geometry)), ((60, size), 2))
            forwards = [
                uniform(f"layers-{i}", geometry, mode, lens, padded, step=step, seed=i)
                for i, (lens, padded) in enumerate(plans)
            ]
            found.append(Case(f"{name}-{mode.value}", (shapes, forwards), SINCE))
        found.append(Case(f"{name}-extend", (shapes, extends(geometry)[1:3]), SINCE))
    return found


@behaviour(Fixture.LAYERS, cases=_eager, since=SINCE, bugs=("TRT-LLM#16801", "vllm#25513", "sglang#32062"))
def have_their_own_caches(layers: LayerHarness, forwards: list[ForwardCase]) -> None:
    """In a forward of several layers, each layer writes and reads its own cache with its own scales and shape."""
    for number, forward in enumerate(forwards):
        batch, expected = layers.load(forward, seed=number)
        layers.plan(batch)
        layers.step(forward, batch)
        layers.assert_layers(forward, batch, expected, f"in forward {number}")


def _captured() -> list[Case]:
    found = []
    for name, shapes in _models().items():
        for program in programs_of(shapes[0]):
            size = shapes[0].limits.capture_batch_sizes[-1]
            rounds = [replays(shapes[0], program)[which][1] for which in LARGE]
            forwards = [captured(shapes[0], program, size), *(one for one in rounds if len(one.requests) == size)]
            found.append(Case(f"{name}-{program.value}", (shapes, forwards), SINCE))
    return found


@behaviour(Fixture.LAYERS, cases=_captured, since=SINCE, bugs=("TRT-LLM#16801", "vllm#25513", "sglang#29413"))
def have_their_own_caches_in_a_graph(layers: LayerHarness, forwards: list[ForwardCase]) -> None:
    """A replay of several layers reads what each layer's own cache contains at replay time."""
    first, *later = forwards
    program = next(program for program, mode in MODES.items() if mode is first.mode)
    key = GraphKey(program, len(first.requests))
    batch, _ = layers.load(first, host=layers.capture_host)
    layers.capture(key, first, batch)
    for number, forward in enumerate(later, 1):
        batch, expected = layers.load(forward, seed=number)
        layers.replay(key, batch)
        layers.assert_layers(forward, batch, expected, f"in replay {number}")
