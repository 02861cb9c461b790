"""Tests with one wrong buffer size each: the sweep over edge cases rejects it, and the proof refutes it."""

from __future__ import annotations

from typing import Any

import pytest

from draftmark.errors import BackendHookError
from draftmark.geometry import Geometry, ceil_div, maximum
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.check import ContractViolation, Refused, all_checks
from draftmark_contract.layouts import Layout, LengthConvention, Level
from draftmark_contract.roles import Role
from draftmark_proof.prover import Status, prove_plan
from draftmark_proof.theorems import VARIANTS, plan_of
from draftmark_testing.sizing_backends import LAYOUTS, NAMES, changed, correct, one, subject_of

UNDERSIZED = {
    "M01-no-topk-in-tail": (
        "csr_tokens",
        Role.KV_INDICES,
        lambda g: (g.max_reqs * (g.limits.max_context_len + 2 * maximum(g.draft.num_draft_tokens, g.draft.num_steps)),),
    ),
    "M01-no-topk-in-mask-rows": ("csr_pages", Role.TAIL_MASK, lambda g: (g.max_reqs, g.mask_words)),
    "M02-no-draft-tokens-in-columns": (
        "page_table",
        Role.PAGE_TABLE,
        lambda g: (g.max_reqs, ceil_div(g.limits.max_context_len, g.attention.page_size)),
    ),
    "M03-context-instead-of-kv-len": (
        "csr_pages",
        Role.KV_INDICES,
        lambda g: (g.max_reqs * ceil_div(g.limits.max_context_len + 1, g.attention.page_size),),
    ),
    "M03-one-tail-under-overlap": (
        "page_table",
        Role.PAGE_TABLE,
        lambda g: (g.max_reqs, ceil_div(g.limits.max_context_len + g.max_tail, g.attention.page_size)),
    ),
    "M04-pages-for-tokens": ("csr_tokens", Role.KV_INDICES, lambda g: (g.max_reqs * g.max_pages_per_req,)),
    "M05-one-mask-row-per-request": (
        "csr_tokens",
        Role.TAIL_MASK,
        lambda g: (g.max_reqs * ceil_div(g.max_tail, 8),),
    ),
    "M06-indptr-by-live-limit": ("csr_pages", Role.KV_INDPTR, lambda g: (g.limits.max_num_reqs + 1,)),
    "M06-qo-indptr-by-live-limit": ("csr_pages", Role.QO_INDPTR, lambda g: (g.limits.max_num_reqs + 1,)),
    "M06-lens-by-live-limit": ("page_table", Role.KV_LENS, lambda g: (g.limits.max_num_reqs,)),
    "indptr-one-short": ("csr_pages", Role.KV_INDPTR, lambda g: (g.max_reqs,)),
    "floor-instead-of-ceil": (
        "page_table",
        Role.PAGE_TABLE,
        lambda g: (g.max_reqs, g.max_kv_len // g.attention.page_size),
    ),
    "slots-without-extend": (
        "csr_pages",
        Role.SLOT_MAPPING,
        lambda g: (g.max_reqs * maximum(g.draft.num_draft_tokens, g.draft.topk),),
    ),
    "depth-of-one-step": ("csr_pages", Role.TAIL_DEPTH, lambda g: (g.max_reqs, g.draft.num_draft_tokens)),
    "mask-words-rounded-down": (
        "csr_pages",
        Role.TAIL_MASK,
        lambda g: (g.max_reqs * maximum(g.draft.num_draft_tokens, g.draft.topk), maximum(1, g.max_tail // 32)),
    ),
    "staging-by-requests": ("page_table", Role.OUTPUT_STAGING, lambda g: (g.max_reqs, 8, 128)),
}


def _killed_by(subject: BackendUnderTest, names: tuple[str, ...], every: int = 1) -> str:
    """Return the first failing item of these checks, or ""; run every `every`-th case of each check."""
    for check in all_checks():
        for case in check.cases()[::every] if check.name in names else ():
            try:
                check.run(subject, case)
            except Refused:
                continue
            except (ContractViolation, BackendHookError) as violation:
                return f"{check.item(case)}: {violation}"
    return ""


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("every", [15, pytest.param(1, marks=pytest.mark.slow)])
def test_correct_layouts_pass_sizing_checks(layout: str, every: int) -> None:
    """The correct backend of each layout passes the checks that reject wrong buffer sizes."""
    names = ("sizing.covers", "sizing.covers_random", "tightness.index_buffers", "overflow.values_fit")
    assert _killed_by(correct(layout), names, every) == ""


LATE = ("depth-of-one-step",)
"""Mutants that the sweep finds only late; `make test` runs only their proof."""


@pytest.mark.parametrize(
    "mutant", [pytest.param(name, marks=[pytest.mark.slow] if name in LATE else []) for name in UNDERSIZED]
)
def test_undersized_buffers_fail_the_sweep(mutant: str) -> None:
    """A buffer size that lacks a factor or a term is too small in one of the sweep's edge cases."""
    layout, role, shape = UNDERSIZED[mutant]
    assert _killed_by(changed(layout, role, shape), ("sizing.covers",))


@pytest.mark.parametrize("mutant", UNDERSIZED)
def test_undersized_buffers_are_refuted(mutant: str) -> None:
    """If a buffer size is too small, the proof finds a batch that needs more, and plain integers confirm it."""
    layout, role, shape = UNDERSIZED[mutant]
    subject = changed(layout, role, shape)
    found = []
    for variant in VARIANTS:
        plan = plan_of(subject, variant)
        plan.theorems = [theorem for theorem in plan.theorems if theorem.role == role.value]
        proofs = prove_plan(subject, plan, workers=1)
        assert not any(proof.status is Status.UNDECIDED for proof in proofs), proofs
        found += [proof for proof in proofs if proof.status is Status.REFUTED]
        if found:
            break
    assert found and all(" > " in proof.note for proof in found)


OVERSIZED = {
    "M25-table-times-page-size": (
        "page_table",
        Role.PAGE_TABLE,
        lambda g: (g.max_reqs, g.max_pages_per_req * g.attention.page_size),
    ),
    "M25-tokens-for-pages": ("csr_pages", Role.KV_INDICES, lambda g: (g.max_reqs * g.max_kv_len,)),
    "M25-rows-times-topk": (
        "csr_pages",
        Role.KV_INDICES,
        lambda g: (g.max_reqs * g.draft.topk * g.max_pages_per_req,),
    ),
    "M25-lens-times-page-size": (
        "page_table",
        Role.KV_LENS,
        lambda g: (g.max_reqs * g.attention.page_size,),
    ),
    "M25-slots-times-topk": ("csr_pages", Role.SLOT_MAPPING, lambda g: (g.max_rows_any * (g.draft.topk + 1),)),
    "M25-slots-times-context": (
        "csr_pages",
        Role.SLOT_MAPPING,
        lambda g: (g.max_rows_any * g.limits.max_context_len,),
    ),
}


@pytest.mark.parametrize("mutant", OVERSIZED)
def test_oversized_buffers_fail_tightness(mutant: str) -> None:
    """A buffer size with an extra factor fails the tightness check, because no batch needs that much memory."""
    layout, role, shape = OVERSIZED[mutant]
    assert _killed_by(changed(layout, role, shape), ("tightness.index_buffers",))


NARROW = {"csr_pages": (Role.SLOT_MAPPING, Role.KV_INDPTR), "csr_tokens": (Role.KV_INDICES, Role.KV_INDPTR)}


@pytest.mark.parametrize(("layout", "role"), [(name, role) for name, roles in NARROW.items() for role in roles])
def test_int32_offsets_fail_overflow(layout: str, role: Role) -> None:
    """Mutant M29: slots and prefix sums above 2**31 do not fit into int32 buffers."""
    sizing, _ = LAYOUTS[layout]
    shapes = {"shape": lambda g: next(spec.shape for spec in sizing(g) if spec.name == role)}
    assert _killed_by(changed(layout, role, shapes["shape"], dtype="int32"), ("overflow.values_fit",))


def _own(workspace: Any, usage: Any) -> BackendUnderTest:
    """Return a backend with one buffer, a workspace of the size that `workspace` gives."""
    return subject_of(
        lambda g: [one(Role.WORKSPACE, (workspace(g),), "uint8")],
        lambda specs: Level(Layout.PAGE_TABLE, LengthConvention.PREFIX_PLUS_TAIL),
        usage=lambda g, batch: usage(g, batch),
    )


def _by_rows(g: Geometry, batch: Any) -> dict[str, int]:
    return {"workspace": 16 * batch.num_rows * g.device.num_sms}


OWN = {
    "right": (lambda g: 16 * g.max_rows_any * g.device.num_sms, _by_rows, ""),
    "constant": (lambda g: 1 << 14, _by_rows, "sizing.covers"),
    "one-processor-count": (lambda g: 16 * g.max_rows_any * 132, _by_rows, "sizing.covers_processors"),
    "small-batches-need-more": (
        lambda g: 16 * g.max_rows_any,
        lambda g, batch: {"workspace": 16 * (batch.num_rows if batch.num_reqs != 3 else 100 * g.max_rows_any)},
        "sizing.covers_processors",
    ),
    "three-times-too-large": (
        lambda g: 48 * g.max_rows_any * g.device.num_sms,
        _by_rows,
        "tightness.own_buffers",
    ),
    "unnamed": (lambda g: 16 * g.max_rows_any, lambda g, batch: {}, "sizing.covers"),
    "tensor-read": (lambda g: 16, lambda g, batch: {"workspace": int(batch.prefix_lens.max())}, "sizing.covers"),
}


@pytest.mark.parametrize("case", OWN)
def test_own_buffers_are_compared_with_usage(case: str) -> None:
    """The sweep accepts an own buffer if usage() <= declared size <= 2 x usage(), for every size and device."""
    workspace, usage, killer = OWN[case]
    subject = _own(workspace, usage)
    names = ("sizing.covers", "sizing.covers_processors", "tightness.own_buffers")
    assert _killed_by(subject, (killer,)).startswith(killer)
    assert killer or not _killed_by(subject, names, every=5)
