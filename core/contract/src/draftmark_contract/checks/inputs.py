"""Checks that a forward's tensors may have any address and layout that `draftmark.backend.AttentionBackend` allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..behaviour import Fixture, behaviour
from ..cases.forward_sets import representative_forwards, spanning_forwards
from ..cases.forwards import ForwardCase
from ..cases.geometries import shapes
from ..check import Case

if TYPE_CHECKING:
    from ..harness.harness import Harness

SINCE = (1, 3)
ALSO = ("all-modes", "all-few-graphs", "all-few-graphs-window", "target-window", "all-kv8", "all-fp32")
"""Shapes that these checks run in addition to the shapes that every check runs."""


def _forwards() -> list[Case]:
    return [shape.case(representative_forwards(shape.geometry)) for shape in shapes(*ALSO)]


@behaviour(Fixture.FORWARDS, cases=_forwards, since=SINCE)
def may_be_views_of_one_projection(harness: Harness, forwards: list[ForwardCase]) -> None:
    """q, k and v may be strided views: slices of one fused projection, or rows with strides of their own.

    Each head is contiguous. v may be the only slice of the projection.
    """
    forms = harness.row_forms
    for number, forward in enumerate(forwards):
        form = forms[number % len(forms)]
        harness.tensors.set_row_form(form)
        batch = harness.load(forward, seed=number)
        watch = harness.watch(forward, batch)
        harness.assert_forward(forward, batch, f"with q, k and v as {form} the output")
        watch.assert_unchanged_except(("cache.k", "cache.v", "out"), "a forward")


def _any_place() -> list[Case]:
    return [shape.case(spanning_forwards(shape.geometry)) for shape in shapes(*ALSO)]


@behaviour(Fixture.FORWARDS, cases=_any_place, since=SINCE, bugs=("sglang#27664", "vllm#26499"))
def may_lie_elsewhere_each_time(harness: Harness, forwards: list[ForwardCase]) -> None:
    """One backend serves two sets of batch buffers, rows and KV pools, one after the other.

    An engine fills one set while the backend runs on the other.
    """
    sets = (harness.tensors, harness.more_tensors())
    order = [*forwards, *forwards[::-1]]
    for number, forward in enumerate(order):
        harness.tensors = sets[(number + number // len(forwards)) % 2]
        what = f"on the {'second' if harness.tensors is sets[1] else 'first'} set of tensors the output"
        harness.assert_forward(forward, harness.load(forward, seed=number), what)


@behaviour(Fixture.FORWARDS, cases=_forwards, since=SINCE)
def may_come_in_any_grad_mode(harness: Harness, forwards: list[ForwardCase]) -> None:
    """Forwards are right in inference mode, and with gradients disabled or enabled, in any sequence."""
    for number, mode in enumerate(("inference", "none", "enabled", "inference")):
        for forward in forwards[number % 2 :: 2] if number else forwards:
            batch = harness.load(forward, seed=number)
            expected = harness.expected(forward)
            with harness.grad_mode(mode):
                harness.run(forward, batch)
            harness.assert_step(forward, batch, expected, f"in grad mode {mode!r} the output")
