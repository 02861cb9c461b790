"""What a forward is handed may lie anywhere, and in every form that `draftmark.backend.AttentionBackend` allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..behaviour import Given, behaviour
from ..cases.forward_sets import representative_forwards, spanning_forwards
from ..cases.forwards import ForwardCase
from ..cases.geometries import shapes
from ..check import Case

if TYPE_CHECKING:
    from ..harness.harness import Harness

SINCE = (1, 3)
ALSO = ("all-modes", "all-few-graphs", "all-few-graphs-window", "target-window", "all-kv8", "all-fp32")
"""Shapes beside those that every check takes."""


def _forwards() -> list[Case]:
    return [shape.case(representative_forwards(shape.geometry)) for shape in shapes(*ALSO)]


@behaviour(Given.FORWARDS, cases=_forwards, since=SINCE)
def may_be_views_of_one_projection(harness: Harness, forwards: list[ForwardCase]) -> None:
    """q, k and v are slices of a fused projection, or v alone is, or each has wider rows of its own: strides differ.

    Each head is contiguous.
    """
    from ..harness.tensors import RowForm

    forms = tuple(RowForm)
    for number, forward in enumerate(forwards):
        form = forms[number % len(forms)]
        harness.tensors.lay(form)
        batch = harness.load(forward, seed=number)
        watch = harness.watch(forward, batch)
        harness.forward_holds(forward, batch, f"with q, k and v as {form} the output")
        watch.unchanged_but(("cache.k", "cache.v", "out"), "a forward")


def _any_place() -> list[Case]:
    return [shape.case(spanning_forwards(shape.geometry)) for shape in shapes(*ALSO)]


@behaviour(Given.FORWARDS, cases=_any_place, since=SINCE, bugs=("sglang#27664", "vllm#26499"))
def may_lie_elsewhere_each_time(harness: Harness, forwards: list[ForwardCase]) -> None:
    """Two sets of batch buffers, rows and pools take turns on one backend: one may be filled while the other runs."""
    sets = (harness.tensors, harness.more_tensors())
    order = [*forwards, *forwards[::-1]]
    for number, forward in enumerate(order):
        harness.tensors = sets[(number + number // len(forwards)) % 2]
        what = f"on the {'second' if harness.tensors is sets[1] else 'first'} set of tensors the output"
        harness.forward_holds(forward, harness.load(forward, seed=number), what)


@behaviour(Given.FORWARDS, cases=_forwards, since=SINCE)
def may_come_in_any_grad_mode(harness: Harness, forwards: list[ForwardCase]) -> None:
    """A first forward in inference mode, then some without and with gradients recorded, and in inference mode again."""
    for number, mode in enumerate(("inference", "none", "enabled", "inference")):
        for forward in forwards[number % 2 :: 2] if number else forwards:
            batch = harness.load(forward, seed=number)
            expected = harness.expected(forward)
            with harness.grad_mode(mode):
                harness.run(forward, batch)
            harness.step_holds(forward, batch, expected, f"in grad mode {mode!r} the output")
