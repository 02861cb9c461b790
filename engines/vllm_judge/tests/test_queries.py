"""Tests of the judge's detection of layers that round their queries to fp8."""

from __future__ import annotations

from types import SimpleNamespace as Object

import pytest
import torch

from draftmark_contract.check import Unjudged
from draftmark_vllm_judge.queries import rounds_queries

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def test_layer_with_a_quantizer_rounds_its_queries():
    """A layer with a query quantizer, as with TRITON_ATTN and FLASH_ATTN on a GPU, is detected as rounding queries."""
    assert rounds_queries(Object(query_quant=object()), Object())
    assert not rounds_queries(Object(query_quant=None), Object())
    assert not rounds_queries(Object(), Object())


def test_a_builder_may_plan_for_queries_in_fp8():
    """A builder with an fp8 query dtype rounds queries. Different dtypes for prefill and decode raise Unjudged."""
    assert rounds_queries(Object(), Object(q_data_type=FP8))
    assert not rounds_queries(Object(), Object(q_data_type_prefill=BF16, q_data_type_decode=BF16))
    with pytest.raises(Unjudged, match="prefills"):
        rounds_queries(Object(), Object(q_data_type_prefill=FP8, q_data_type_decode=BF16))
