"""Whether vLLM rounds the queries to e4m3 before a backend's kernel reads them, as it does where KV is fp8."""

from __future__ import annotations

from typing import Any

from draftmark_contract.judge.item import NotAsked

PLANNED = ("q_data_type", "q_data_type_prefill", "q_data_type_decode")
"""Names under which a builder keeps the dtype of queries that it plans its kernels for."""


def rounds_queries(layer: Any, builder: Any) -> bool:
    """Whether the layer quantises its queries, or the builder plans for queries in fp8.

    Raises:
        NotAsked: FlashInfer on Hopper rounds the queries of prefills and leaves those of decodes.
    """
    if getattr(layer, "query_quant", None) is not None:
        return True
    eight = {"float8" in str(getattr(builder, name)) for name in PLANNED if hasattr(builder, name)}
    if len(eight) > 1:
        raise NotAsked("vLLM rounds the queries of prefills to fp8 here and not those of decodes, within one step")
    return eight == {True}
