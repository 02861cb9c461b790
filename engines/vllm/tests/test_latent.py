"""Tests of MLA layers without an engine: builder and layer against dense float64 attention. Needs vLLM."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backend import AttentionBackend

from draftmark import AttentionShape, DeviceProfile, Form, load
from draftmark_engines import EngineError, EngineLimits
from draftmark_vllm.backend import DraftmarkBackend
from draftmark_vllm.bound_backends import BoundBackends, Geometries
from draftmark_vllm.latent.backend import DraftmarkMLABackend, _refused_for_latent
from draftmark_vllm.latent.builder import DraftmarkMLABuilder
from draftmark_vllm.latent.impl import DraftmarkMLAImpl
from draftmark_vllm.limits import latent_layer_shape
from draftmark_vllm.step import StepBuffers

MAX_REQS, MAX_LEN, VERIFY_ROWS = 6, 200, 5
LIMITS = EngineLimits(MAX_REQS, MAX_LEN, MAX_REQS * VERIFY_ROWS, VERIFY_ROWS, host_lag=True)
UNREAD = float("nan")


@dataclass(frozen=True)
class Rows:
    """Describes a step: heads, row width, value part, page size, and each request's prefix and rows."""

    heads: int
    width: int
    value_dim: int
    page_size: int
    requests: tuple[tuple[int, int], ...]
    padding: int = 0

    @property
    def shape(self) -> AttentionShape:
        """Attention shape of the layer, with the scale that a model with heads of 24 elements has."""
        return latent_layer_shape(
            self.heads, self.width, self.value_dim, self.page_size, torch.float32, "auto", 24**-0.5
        )


STEPS = {
    "decode": Rows(4, 576, 512, 16, ((17, 1), (0, 1), (150, 1))),
    "decode-padded": Rows(4, 576, 512, 64, ((17, 1), (63, 1)), padding=3),
    "verify": Rows(20, 40, 32, 48, ((47, 5), (48, 5), (0, 5))),
    "verify-padded": Rows(3, 40, 32, 16, ((15, 5), (131, 5)), padding=2),
    "uneven": Rows(6, 32, 32, 16, ((15, 3), (131, 1), (16, 5), (0, 2))),
    "one-row-of-five": Rows(1, 320, 256, 32, ((31, 1), (64, 1))),
}


class Step:
    """Holds the tensors of a step as vLLM passes them, and the right output of its live rows, in float64."""

    def __init__(self, rows: Rows) -> None:
        make = torch.Generator().manual_seed(3)
        lens = [prefix + new for prefix, new in rows.requests]
        self.live = sum(new for _, new in rows.requests)
        each = -(-MAX_LEN // rows.page_size)
        reqs = len(lens) + rows.padding
        table = torch.zeros(reqs, each + 3, dtype=torch.int32)
        ids = torch.randperm(len(lens) * each, generator=make).view(-1, each) + 1
        table[: len(lens), :each] = ids.int()
        self.cache = torch.full((int(ids.max()) + 1, rows.page_size, rows.width), UNREAD)
        self.cache[0] = 0
        total = self.live + rows.padding * rows.requests[0][1]
        self.q = torch.randn(total, rows.heads, rows.width, generator=make)
        starts, wanted = [0], []
        for number, (prefix, new) in enumerate(rows.requests):
            keys = torch.randn(prefix + new, rows.width, generator=make)
            for position, key in enumerate(keys):
                self.cache[int(table[number, position // rows.page_size]), position % rows.page_size] = key
            wanted.append(_dense(self.q[starts[-1] : starts[-1] + new], keys, rows, prefix))
            starts.append(starts[-1] + new)
        starts += starts[-1:] * rows.padding
        self.wanted = torch.cat(wanted)
        self.common = SimpleNamespace(
            causal=True,
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lens + [0] * rows.padding, dtype=torch.int32),
            block_table_tensor=table,
            slot_mapping=torch.full((total,), -1, dtype=torch.int64),
            num_actual_tokens=total,
            seq_lens_cpu_upper_bound=None,
        )


def _dense(q: torch.Tensor, keys: torch.Tensor, rows: Rows, prefix: int) -> torch.Tensor:
    scores = torch.einsum("qhd,nd->hqn", q.double(), keys.double()) * 24**-0.5
    hidden = torch.arange(len(keys)) > torch.arange(len(q))[:, None] + prefix
    return torch.einsum(
        "hqn,nd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), keys[:, : rows.value_dim].double()
    )


def bound(shape: AttentionShape, forms: tuple[Form, ...] = tuple(Form)) -> BoundBackends:
    """Open the reference backend for one layer, with those of `forms` that it has."""
    loaded = copy(load("reference"))
    loaded.info = replace(loaded.info, forms=tuple(one for one in loaded.info.forms if one in forms))
    return BoundBackends(loaded, [shape], LIMITS, DeviceProfile(), torch.device("cpu"))


def builder_of(backends: BoundBackends, columns: int = 0) -> DraftmarkMLABuilder:
    """Return a builder without an engine."""
    cpu, made = torch.device("cpu"), object.__new__(DraftmarkMLABuilder)
    buffers = StepBuffers(MAX_REQS, MAX_REQS * VERIFY_ROWS, cpu, columns)
    vars(made).update(
        {
            "_bound": backends,
            "_buffers": buffers,
            "device": cpu,
            "_verify_rows": VERIFY_ROWS,
            "_ragged": backends.any.ragged,
        }
    )
    vars(made).update(dict.fromkeys(("_host_lengths", "_exact", "_debug", "_capture"), False))
    vars(made).update(dict.fromkeys(("_chunk", "_tails", "_adaptive"), None))
    made._graphs = made._new_graphs()
    return made


def decode_of(builder: DraftmarkMLABuilder, common: Any, capture: bool = False) -> Any:
    """Build a step of decodes only, with the arguments of vLLM 0.33."""
    builder._cam, builder._capture = common, capture
    return builder._build_decode(
        block_table_tensor=common.block_table_tensor,
        seq_lens_device=common.seq_lens,
        max_seq_len=MAX_LEN,
        query_start_loc_cpu=common.query_start_loc_cpu,
        query_start_loc_device=common.query_start_loc,
        num_decode_tokens=common.num_actual_tokens,
        max_query_len=VERIFY_ROWS,
        dcp_tot_seq_lens_device=None,
    )


def attention_of(rows: Rows, step: Step, decode: Any, parts: bool = False) -> torch.Tensor:
    """Run one layer on a step, with queries whole or in two parts, and return its output."""
    impl = object.__new__(DraftmarkMLAImpl)
    vars(impl).update(kv_lora_rank=rows.value_dim, _shape=rows.shape, _rows=None, _cache=None)
    q: Any = step.q.split([rows.value_dim, rows.width - rows.value_dim], -1) if parts else step.q
    out, lse = impl.forward_mqa(q, step.cache, SimpleNamespace(decode=decode), None)
    assert lse is None and out.shape == (len(step.q), rows.heads, rows.value_dim)
    return out


@pytest.mark.parametrize("name", STEPS)
def test_decodes_and_verifies_equal_dense_attention(name: str) -> None:
    """Decodes, verifies, uneven verifies and padded steps equal dense attention over whole rows, values in front."""
    rows = STEPS[name]
    step = Step(rows)
    out = attention_of(rows, step, decode_of(builder_of(bound(rows.shape)), step.common), parts=name == "verify")
    assert (out[: step.live].double() - step.wanted).abs().max() < 2e-5
    assert out.isfinite().all()


def test_backend_without_vllms_page_table() -> None:
    """A backend without ENGINE_TABLE gets a copy of the page table in draftmark's width."""
    rows = STEPS["uneven"]
    step, backends = Step(rows), bound(rows.shape, (Form.ENGINE_STORES,))
    columns = backends.any.decode_verify.max_pages_per_req
    out = attention_of(rows, step, decode_of(builder_of(backends, columns), step.common))
    assert (out[: step.live].double() - step.wanted).abs().max() < 2e-5


def test_captured_step_is_prepared_by_a_replay() -> None:
    """After a capture the builder only replays the metadata graph, which reads the lengths of the current step."""
    rows = STEPS["decode"]
    step, builder = Step(rows), builder_of(bound(rows.shape))
    captured = decode_of(builder, step.common, capture=True)
    lens = step.common.seq_lens.clone()
    step.common.seq_lens.sub_(1)
    decode_of(builder, step.common)
    step.common.seq_lens.copy_(lens)
    replayed = decode_of(builder, step.common)
    assert replayed.parts[0][1] is captured.parts[0][1]
    assert (attention_of(rows, step, replayed).double() - step.wanted).abs().max() < 2e-5


def test_draft_step_metadata_is_updated_on_the_device() -> None:
    """`update_draft_decode_metadata` changes metadata of shorter requests to the lengths of this step."""
    rows = STEPS["decode"]
    step, builder = Step(rows), builder_of(bound(rows.shape))
    lens = step.common.seq_lens.clone()
    step.common.seq_lens.fill_(1)
    decode = decode_of(builder, step.common)
    step.common.seq_lens.copy_(lens)
    builder.update_draft_decode_metadata(SimpleNamespace(decode=decode))
    assert (attention_of(rows, step, decode).double() - step.wanted).abs().max() < 2e-5


@pytest.mark.parametrize("newer", [(), (False,)], ids=["six", "seven"])
def test_rows_are_stored_at_their_slots_on_a_cpu(newer: tuple[bool, ...]) -> None:
    """On a CPU the layer stores rows itself. A row with slot -1, and rows after the last slot, store nothing.

    vLLM gives six arguments, and seven since 0.33.
    """
    cache, impl = torch.zeros(4, 16, 40), object.__new__(DraftmarkMLAImpl)
    kv_c, k_pe = torch.randn(5, 32), torch.randn(5, 1, 8)
    impl.do_kv_cache_update(kv_c, k_pe, cache, torch.tensor([17, -1, 63]), "auto", torch.ones(1), *newer)
    wanted = torch.zeros(64, 40)
    wanted[[17, 63]] = torch.cat([kv_c, k_pe[:, 0]], -1)[[0, 2]]
    assert torch.equal(cache.view(64, 40), wanted)


def test_backend_that_stores_kv_itself_is_refused() -> None:
    """A backend without ENGINE_STORES is refused, because vLLM stores the rows of MLA layers itself."""
    with pytest.raises(EngineError, match="has no ENGINE_STORES, but vLLM stores the rows of MLA layers itself"):
        bound(STEPS["decode"].shape, ())
    made = Geometries.of(load("reference"), STEPS["decode"].shape, LIMITS, DeviceProfile())
    assert Form.ENGINE_STORES in made.decode_verify.forms


@pytest.mark.parametrize("reasons", [[], ["a reason"]], ids=["served", "refused"])
def test_custom_names_a_class_for_each_kind_of_layer(monkeypatch: pytest.MonkeyPatch, reasons: list[str]) -> None:
    """Right after an MLA layer was validated, CUSTOM names the class for MLA layers; otherwise it names its own."""
    own = (DraftmarkBackend.__module__, DraftmarkBackend.__qualname__)
    monkeypatch.setattr(DraftmarkMLABackend, "validate_configuration", lambda **given: reasons)
    monkeypatch.setattr(AttentionBackend, "validate_configuration", classmethod(lambda cls, **given: []))
    assert DraftmarkBackend.validate_configuration(use_mla=True) == reasons
    named = DraftmarkBackend.full_cls_name()
    assert named == (own if reasons else (DraftmarkMLABackend.__module__, DraftmarkMLABackend.__qualname__))
    assert DraftmarkBackend.full_cls_name() == own
    DraftmarkBackend.validate_configuration(use_mla=True)
    assert DraftmarkBackend.validate_configuration(use_mla=False) == []
    assert DraftmarkBackend.full_cls_name() == own


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_ds_mla"])
def test_fp8_rows_reach_the_adapters_refusal(dtype: str) -> None:
    """The predicate of vLLM passes fp8 rows and rows of 656 bytes, so that the adapter refuses them with a remedy."""
    assert DraftmarkMLABackend.supports_kv_cache_dtype(dtype)
    assert "leave --kv-cache-dtype out" in (_refused_for_latent(None, dtype) or "")
    assert DraftmarkBackend.supports_kv_cache_dtype(dtype) is (dtype != "fp8_ds_mla")
