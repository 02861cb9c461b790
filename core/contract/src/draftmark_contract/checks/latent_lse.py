"""Checks of the log-sum-exp that a backend returns for merging: natural, and over keys only."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from draftmark.geometry import AttentionShape

from ..behaviour import Fixture, behaviour
from ..cases import latent as cases
from ..cases.contents import Contents
from ..cases.forwards import ForwardCase
from ..check import Case, ContractViolation, Refused, Wrong

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest
    from ..harness.harness import Harness

PLAIN = AttentionShape(8, 2, 128, 64)
ROUNDING = 2.0**-10
"""Absolute error of a log-sum-exp, next to the error of its logits: of an approximate exp and log, and of the sum."""


def _cases() -> list[Case]:
    """Return forwards of a latent layer, then of layers with K and V apart, with and without sinks."""
    found = []
    others = {"plain": PLAIN, "sinks": replace(PLAIN, sinks=True)}
    for label, modes in cases.MODES.items():
        for name in ("h16-page64", "parts-h8-page128", "h20-256-page32")[: 3 if label == "core" else 1]:
            latent = cases.geometry_of(cases.ATTENTIONS[name], modes, cases.forms_of(name))
            found.append(Case(f"{name}-{label}", cases.forwards_of(latent), cases.SINCE))
    latent = cases.geometry_of(cases.ATTENTIONS["h16-page64"], cases.MODES["core"])
    for name, shape in others.items():
        forwards = cases.forwards_of(cases.geometry_of(shape, cases.MODES["core"]))
        found.append(Case(f"{name}-core", [*cases.forwards_of(latent)[:1], *forwards], cases.SINCE))
    return found


@behaviour(Fixture.SUBJECT, cases=_cases, since=cases.SINCE)
def is_natural(subject: BackendUnderTest, forwards: list[ForwardCase]) -> None:
    """A backend that claims BackendInfo.lse returns the natural log-sum-exp of each row's logits, without its sink.

    Rows that see one key only are among the rows. A backend without the claim never receives the argument. As in the
    product with values, weights may be rounded to q's dtype before they are summed.
    """
    subject.require(forwards[0].geometry)
    if not subject.backend.info.lse:
        return
    from ..harness.harness import Harness

    opened: dict[object, Harness] = {}
    pages = max(one.num_pages for one in forwards)
    for forward in forwards:
        try:
            harness = opened.get(forward.geometry) or Harness(subject, forward.geometry, pages)
        except Refused:
            if forward.geometry.attention.latent:
                raise
            continue  # A backend may serve latent layers only.
        opened[forward.geometry] = harness
        placed = harness.place(forward)
        for seed, contents in enumerate((Contents.USUAL, Contents.LARGE)):
            assert_lse(harness, placed, contents, seed)


def assert_lse(harness: Harness, forward: ForwardCase, contents: Contents, seed: int) -> None:
    """Run a forward that asks for the log-sum-exp, and compare it and the output with float64."""
    import torch

    tensors = harness.tensors
    tensors.lse = torch.full(tensors.q.shape[:2], float("nan"), dtype=torch.float32, device=tensors.q.device)
    batch = harness.load(forward, contents=contents, seed=seed)
    expected = harness.expected(forward)
    harness.run(forward, batch)
    harness.assert_step(forward, batch, expected, f"with {contents} contents the output")
    if not harness.kernels:
        return
    live, answer = forward.live_rows, expected.answer
    found, want = tensors.lse[:live].to(answer.lse.device).double(), answer.lse[:live, :, 0]
    capped = 2 * forward.geometry.attention.logits_soft_cap * 2.0**-11
    summed = torch.finfo(tensors.q.dtype).eps / 2
    bound = ROUNDING + summed + capped + 8 * 2.0**-24 * answer.strain[:live, :, 0]
    wrong = ~((found - want).abs() <= bound) & (found != want)
    after = tensors.lse[live : forward.num_rows]
    if bool(wrong.any()):
        number, head = (int(i) for i in wrong.nonzero()[0])
        row = forward.rows[number]
        raise ContractViolation(
            f"the log-sum-exp of row {row[1]} of request {row[0]}, head {head}, is wrong",
            batch=forward,
            got=f"{float(found[number, head]):.6g}",
            expected=f"{float(want[number, head]):.6g} ± {float(bound[number, head]):.2g}",
            formula="log of the sum of exp(scale · q·k) over the row's keys, natural, without the sink",
            bug="flashinfer: base 2 unless asked",
            remedy="multiply a base-2 value by ln 2, and leave the sink out",
            wrong=Wrong("output", (row,)),
        )
    if bool(after.isnan().any()) or bool((after == float("inf")).any()):
        raise ContractViolation(
            "the log-sum-exp of a padding row is NaN or infinity",
            batch=forward,
            got="NaN or infinity",
            expected="-inf or finite values in every padding row",
        )
