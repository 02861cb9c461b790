"""Detection of query rounding: with fp8 KV vLLM may round queries to e4m3 before a backend's kernel reads them."""

from __future__ import annotations

from typing import Any

from draftmark_contract.check import Unjudged

PLANNED = ("q_data_type", "q_data_type_prefill", "q_data_type_decode")
"""Attributes in which builders keep the dtype of queries that their kernels are planned for."""


def rounds_queries(layer: Any, builder: Any) -> bool:
    """Return whether the layer quantizes its queries, or the builder plans for fp8 queries.

    Raises:
        Unjudged: FlashInfer on Hopper rounds queries of prefills but not of decodes, which the judge cannot test.
    """
    if getattr(layer, "query_quant", None) is not None:
        return True
    eight = {"float8" in str(getattr(builder, name)) for name in PLANNED if hasattr(builder, name)}
    if len(eight) > 1:
        raise Unjudged("within one step vLLM rounds the queries of prefills to fp8, but not the queries of decodes")
    return eight == {True}
