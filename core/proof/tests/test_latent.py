"""Theorems about latent layers: z3 proves the true ones and refutes those that size a schedule by requests only."""

from __future__ import annotations

import pytest

from draftmark.geometry import AttentionShape, DraftShape, Geometry, Limits, Mode
from draftmark_contract.sizing import latent_schedules as schedules
from draftmark_proof.latent import FALSE, THEOREMS, Batch, decide
from draftmark_proof.prover import Status


@pytest.mark.parametrize("name", THEOREMS)
def test_a_true_statement_is_proved(name: str) -> None:
    """z3 proves each theorem for all heads, widths, pages, requests, rows and SMs."""
    status, _ = decide(THEOREMS[name])
    assert status is Status.PROVED


@pytest.mark.parametrize("name", FALSE)
def test_a_schedule_sized_by_requests_is_refuted(name: str) -> None:
    """z3 finds a batch that needs more, and plain integers confirm it."""
    status, answer = decide(FALSE[name])
    assert status is Status.REFUTED
    batch = Batch.__new__(Batch)
    names = {"heads": "H", "value": "V", "sms": "SMs", "requests": "R", "rows": "q"}
    names |= {"max_requests": "max_R", "max_rows": "max_q"}
    for attribute, symbol in names.items():
        setattr(batch, attribute, answer.model[symbol])
    assert FALSE[name](batch) is False
    assert batch.requests <= batch.max_requests and batch.rows <= batch.max_rows


def test_assumptions_hold_for_some_batch() -> None:
    """No theorem is empty: a false goal under the same assumptions is refuted, not proved."""
    status, _ = decide(lambda batch: batch.rows < batch.rows)
    assert status is Status.REFUTED


def test_schedules_by_hand() -> None:
    """Sizes of DeepSeek V3 at 16 ranks, 8 rows a request, 256 requests, 132 SMs."""
    shape = AttentionShape(8, 1, 576, 64, softmax_scale=192**-0.5, value_dim=512, latent=True)
    geometry = Geometry.create(shape, Limits(256, 1024), DraftShape(num_draft_tokens=8))
    assert schedules.packed_rows(geometry, Mode.VERIFY) == 64 and schedules.packed_rows(geometry, Mode.DECODE) == 8
    assert schedules.flashmla_parts(64, 132) == 132 and schedules.flashmla_parts(65, 132) == 66
    assert schedules.flashmla_parts(64 * 200, 132) == 1
    assert schedules.flashmla_partials(256, 64, 512, 132) == (256 + 132) * 64 * 513
    assert schedules.flashmla_partials_bound(256, 64, 512, 132) == (256 * 64 + 64 * 132) * 513
    assert (schedules.flash_attention_3(255), schedules.flash_attention_3_reserved(255)) == (769, 1025)
    assert schedules.flashinfer_works(256, 65, 132) == 256 * 2 + 132
    # A prefill of 16,384 rows and 128 heads passes FlashInfer's 16,384 works, and must be refused.
    assert schedules.flashinfer_extend_works(1, 16_384, 128, 132) > schedules.FLASHINFER_WORKS
