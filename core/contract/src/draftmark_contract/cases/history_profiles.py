"""Geometries for which random sequences of forwards are generated. No torch."""

from __future__ import annotations

from dataclasses import replace

from draftmark.geometry import (
    CORE_MODES,
    DRAFT_MODES,
    LAYOUT_FORMS,
    TARGET_MODES,
    AttentionShape,
    DraftShape,
    Form,
    Geometry,
    Limits,
    Mode,
)

from .geometries import ONE_KV_HEAD, PAGE128, PAGE128_TREE, SMALL, TREE, mandatory


def profiles() -> dict[str, Geometry]:
    """Return the geometries for which random sequences are generated, by name."""
    limits = Limits(max_num_reqs=5, max_context_len=84, max_extend_tokens=40, capture_batch_sizes=(1, 3))
    wide = replace(ONE_KV_HEAD, page_size=8, window_left=5, logits_soft_cap=30.0)
    large = replace(limits, max_context_len=300)
    make = Geometry.create
    every, bounded = tuple(Mode), replace(limits, row_budgets=(6, 30))
    half = replace(SMALL, q_dtype="float16", kv_dtype="float16")
    half_of_one = replace(ONE_KV_HEAD, q_dtype="float16", kv_dtype="float16")

    def seven(attention: AttentionShape, *forms: Form, limits: Limits = bounded) -> Geometry:
        # With forms a block has the rows of a verify tail, so that batches of both modes have equal sizes.
        block = TREE.num_draft_tokens if forms else 4
        return make(attention, limits, replace(TREE, block_size=block), modes=every, forms=forms)

    return {
        "plain": mandatory(),
        "verifying": make(SMALL, limits, TREE, modes=TARGET_MODES),
        "drafting": make(replace(ONE_KV_HEAD, page_size=1), replace(limits, overlap=True), TREE, modes=DRAFT_MODES),
        "all": make(replace(SMALL, page_size=4, q_dtype="float32", kv_dtype="float32"), limits, TREE, modes=CORE_MODES),
        "all-window": make(wide, limits, DraftShape(2, 3, 5), modes=CORE_MODES),
        "all-page128": make(PAGE128, large, PAGE128_TREE, modes=CORE_MODES),
        "all-no-graphs": make(
            AttentionShape(6, 2, 64, 16), replace(limits, capture_batch_sizes=()), TREE, modes=CORE_MODES
        ),
        "seven": seven(half),
        "seven-forms": seven(replace(half, page_size=8), *LAYOUT_FORMS),
        "seven-slots-window": seven(replace(half_of_one, window_left=5, logits_soft_cap=30.0), Form.ENGINE_SLOTS),
        "seven-table": seven(replace(half, num_kv_heads=1), Form.ENGINE_TABLE),
        "seven-strided-fp32": seven(replace(SMALL, q_dtype="float32", kv_dtype="float32"), Form.STRIDED_KV),
        "seven-forms-page128": seven(PAGE128, *LAYOUT_FORMS, limits=replace(large, row_budgets=(9,))),
        "seven-sinks": seven(replace(half, sinks=True)),
        "seven-kv8-overlap": seven(
            replace(half_of_one, kv_dtype="float8_e4m3fn"), limits=replace(bounded, overlap=True)
        ),
    }
