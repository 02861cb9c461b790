"""Items that vary a step's inputs: upper bounds as host lengths, strided views, changed addresses, repeated runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from ...cases.forward_sets import extends
from ...check import ContractViolation
from ...harness.pools import raw
from ...harness.tensor_forms import RowForm
from ...runner.item import Item
from ..driver import EngineCapabilities
from ..step import Step, step_of
from ..subject import EngineSubject
from .building import fitted, on_subject, runs
from .numerics import SMALL, of_each_mode

LENGTHS, REPEATS = "lengths.of_any_kind_give_one_result", "repeats.give_the_same_bits"
VIEWS, ELSEWHERE = "inputs.may_be_views_of_one_projection", "inputs.may_lie_elsewhere_each_time"
PURE = "purity.each_call_writes_its_own"
LOOSE = "the host's lengths are upper bounds, as in asynchronous steps with drafts"


def questions(caps: EngineCapabilities) -> list[Item]:
    """Return the items that vary inputs, for every mode."""
    found = []
    for name, shape in {"fp32": SMALL, "window": replace(SMALL, window_left=19)}.items():
        geometry = fitted(caps, shape)
        for forward in of_each_mode(geometry, (40, 0, 133)):
            step = step_of(forward, caps.trees)
            steps = [replace(step, loose=n) for n in (1, geometry.attention.page_size + 1, 300)]
            found.append(runs(caps, LENGTHS, f"{name}-{forward.name}", steps, asks=LOOSE))
    geometry = fitted(caps, SMALL)
    for forward in of_each_mode(geometry, (40, 0, 133)):
        step = step_of(forward, caps.trees)
        for rule, body in ((REPEATS, _repeats), (VIEWS, _views), (ELSEWHERE, _moved)):
            found.append(on_subject(caps, rule, forward.name, geometry, forward.num_pages, partial(body, step=step)))
    for forward in extends(geometry):
        found.append(runs(caps, PURE, forward.name, [step_of(forward)], asks="only its own slots of KV change"))
    return found


def _repeats(subject: EngineSubject, step: Step) -> None:
    subject.load(step)
    first = subject.assert_loaded_step(step)
    for _ in range(2):
        again = subject.assert_loaded_step(step)
        if not torch.equal(raw(first), raw(again)):
            worst = (first.double() - again.double()).abs().max().item()
            raise ContractViolation("the same step gives other bits", batch=step, got=f"up to {worst:.3g} apart")


def _views(subject: EngineSubject, step: Step) -> None:
    for form in (RowForm.PROJECTED, RowForm.AFTER_ROPE):  # Engines pass q, k and v in one of these two layouts.
        subject.tensors.set_row_form(form)
        subject.assert_step(step)


def _moved(subject: EngineSubject, step: Step) -> None:
    for number in range(3):
        tensors = subject.tensors
        assert tensors.v is not None, "the judge has layers with K and V apart only"
        tensors.q, tensors.k, tensors.v = (torch.empty_like(one) for one in (tensors.q, tensors.k, tensors.v))
        subject.assert_step(step, seed=number)
