"""Sizes of the schedules that other projects' latent (MLA) kernels keep, by rows and heads. Integers or symbols.

A schedule divides the work of a step among SMs. Its work is counted in packed rows, the query rows of a request times
the query heads of a rank, in tiles of 64. Sizing by requests only is a public fault (vllm#27368, sglang#11012).

Read in FlashMLA (2026-04-29), vLLM 0.26 (FlashAttention 3) and FlashInfer 0.6.18.
"""

from __future__ import annotations

from typing import Any

from draftmark.geometry import Geometry, Mode, ceil_div, maximum

from ..oracle.formulas import rows_and_tail

TILE = 64
"""Packed rows of one tile."""
FLASHINFER_WORKS = 16_384
"""Entries of each array of works in FlashInfer's plan, which it does not check (flashinfer#5170)."""
FLASHMLA_ENTRY = 8
"""int32 numbers of one part of FlashMLA's tile schedule."""


def packed_rows(geometry: Geometry, mode: Mode) -> Any:
    """Return the packed rows of one request in a uniform mode: query rows · query heads."""
    return rows_and_tail(geometry, mode)[0] * geometry.attention.num_qo_heads


def flashmla_parts(packed: Any, num_sms: Any) -> Any:
    """Return FlashMLA's number of schedule parts: ``max(1, SMs // tiles)``."""
    return maximum(1, num_sms // ceil_div(packed, TILE))


def flashmla_partials(requests: Any, packed: Any, value_width: Any, num_sms: Any) -> Any:
    """Return the float32 numbers of FlashMLA's partial outputs and their log-sum-exps, for one batch."""
    return (requests + flashmla_parts(packed, num_sms)) * packed * (value_width + 1)


def flashmla_partials_bound(requests: Any, packed: Any, value_width: Any, num_sms: Any) -> Any:
    """Return float32 numbers that suffice for each batch of at most `requests` requests of `packed` rows."""
    return (requests * packed + maximum(packed, TILE * num_sms)) * (value_width + 1)


def flash_attention_3(requests: Any) -> Any:
    """Return the int32 numbers of FlashAttention 3's scheduler metadata for several rows of each request."""
    return 1 + 3 * (4 * ceil_div(requests, 4))


def flash_attention_3_reserved(requests: Any) -> Any:
    """Return the int32 numbers that vLLM reserves for FlashAttention 3's scheduler metadata."""
    return 1 + 4 * (4 * ceil_div(requests, 4))


def flashinfer_works(requests: Any, packed: Any, num_sms: Any) -> Any:
    """Return an upper bound of the works in FlashInfer's MLA plan for requests of `packed` rows each."""
    return requests * ceil_div(packed, TILE) + num_sms


def flashinfer_extend_works(requests: Any, rows: Any, heads: Any, num_sms: Any) -> Any:
    """Return an upper bound of the works in FlashInfer's MLA plan for ragged requests of `rows` rows together."""
    return requests + ceil_div(rows * heads, TILE) + num_sms
