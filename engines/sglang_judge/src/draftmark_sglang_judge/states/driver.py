"""Runs rounds on one of SGLang's linear-attention backends."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from draftmark_contract.judge.states.driver import Kind, Part, Round
from draftmark_contract.judge.states.layer import Family, Layer, Rows, Weights

from ..probes.bare import bare, member
from .backends import make_backend, make_layer
from .pool import RESERVED, StatePools
from .stand_ins import StandIn

ABSENT = (
    *("mamba_track_indices", "mamba_track_mask", "mamba_prefill_track_mask_cpu", "mamba_track_seqlens"),
    *("mamba_track_seqlens_cpu", "mamba_track_aligned_lens", "tbo_parent_token_range", "multi_item_delimiter_indices"),
    *("spec_info", "extend_num_tokens", "extend_seq_lens", "extend_seq_lens_cpu", "extend_start_loc"),
    *("extend_prefix_lens", "extend_prefix_lens_cpu"),
)
"""Fields of SGLang's ForwardBatch that are None here: prefix cache, two batches at once, several items."""


class Snapshots:
    """Runs one layer of SGLang. A verify stores every row's state in scratch, and the commit copies one to the slot.

    Args:
        layer, weights: the layer to judge.
        drafts: rows of a verify.
        requests: largest number of requests.
        tree: True if drafts are trees.
    """

    def __init__(self, layer: Layer, weights: Weights, drafts: int, requests: int, tree: bool) -> None:
        self.family, self.shape, self.drafts, self.tree = layer.family, layer.shape, drafts, tree
        self.pools = StatePools(layer, drafts, requests, tree)
        self.backend = make_backend(layer, self.pools, tree)
        self.layer = make_layer(layer, weights)
        self.modes = member("srt.model_executor.forward_batch_info", "ForwardMode")
        self._length = [0] * requests
        self._order: list[int] = []

    def start(self, request: int) -> None:
        """Zero the request's slot, as SGLang does before a request's first forward."""
        self._length[request] = 0
        slot = self.pools.slots[request]
        self.pools.conv[:, slot], self.pools.temporal[:, slot] = 0, 0

    def run(self, one: Round, rows: Rows) -> torch.Tensor:
        """Prepare the forward and run the layer. Padding requests follow the live ones and have slot -1."""
        kind = one.parts[0].kind
        assert all(part.kind is kind for part in one.parts), "SGLang's batches have one mode"
        self._order = [part.request for part in one.parts]
        live, count = one.rows, one.padding * (self.drafts if kind is Kind.VERIFY else 1)
        rows = _with_padding(rows, count)
        batch = self._batch(one, len(rows.x))
        self.backend.init_forward_metadata(batch)
        out = self._forward(kind, batch, rows)
        if kind is not Kind.VERIFY:
            for part in one.parts:
                self._length[part.request] += part.rows
        return out.reshape(-1, self.shape.num_heads, self.shape.value_dim)[:live]

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Copy the state and the window of each path's last row from scratch to the slot."""
        leaves = torch.tensor([paths[request][-1] if paths.get(request) else -1 for request in self._order])
        hybrid = member("srt.layers.attention.hybrid_linear_attn_backend", "HybridLinearAttnBackend")
        commits = bare(hybrid, linear_attn_backend=self.backend, req_to_token_pool=self.pools)
        commits.update_mamba_state_after_mtp_verify(leaves, None, None, None)
        for request, path in paths.items():
            self._length[request] += len(path)

    def state(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the slot."""
        slot = self.pools.slots[request]
        window = self.pools.conv[0, slot].clone()
        return self.pools.temporal[0, slot].clone(), window.T if self.family is Family.KDA else window

    def others(self, requests: Sequence[int]) -> torch.Tensor:
        """Return the slots of other requests and the free slots."""
        kept = torch.ones(self.pools.conv.shape[1], dtype=torch.bool)
        kept[:RESERVED] = False
        kept[self.pools.slots[list(requests)]] = False
        both = [
            one[0, kept].flatten(1).contiguous().view(torch.uint8) for one in (self.pools.conv, self.pools.temporal)
        ]
        return torch.cat(both, 1)

    def _forward(self, kind: Kind, batch: Any, rows: Rows) -> torch.Tensor:
        if self.family is Family.MAMBA2:
            gates = torch.zeros(len(rows.x), self.shape.num_heads * self.shape.value_dim, dtype=rows.x.dtype)
            hidden = torch.cat([gates, rows.x, rows.gate], 1)
            out: torch.Tensor = self.backend.forward(self.layer, hidden, None, 0, batch, use_triton_causal_conv=True)
            return out
        run = self.backend.forward_decode if kind is Kind.DECODE else self.backend.forward_extend
        b, gate = rows.b, rows.gate
        if self.family is Family.KDA:
            b, gate = _kda_inputs(kind, rows)
        rows_out: torch.Tensor = run(self.layer, batch, rows.x.contiguous(), gate, b)
        return rows_out

    def _batch(self, one: Round, rows: int) -> Any:
        parts, total = one.parts, len(one.parts) + one.padding
        kind = parts[0].kind
        requests = [part.request + RESERVED for part in parts] + [0] * one.padding
        prefixes = [self._length[part.request] for part in parts] + [0] * one.padding
        counts = [part.rows for part in parts] + [1] * one.padding
        names = {Kind.PREFILL: "EXTEND", Kind.DECODE: "DECODE", Kind.VERIFY: "TARGET_VERIFY"}
        mode = self.modes[names[kind]]
        batch = StandIn(
            forward_mode=mode,
            batch_size=total,
            req_pool_indices=torch.tensor(requests),
            seq_lens=torch.tensor([a + b for a, b in zip(prefixes, counts, strict=True)]),
            input_ids=torch.zeros(rows, dtype=torch.int64),
            **dict.fromkeys(ABSENT),
            _original_batch_size=len(parts) if one.padding else None,
            is_prefill_only=False,
            logical_forward_mode=mode,
        )
        batch.seq_lens_cpu = batch.seq_lens.clone()
        if kind is Kind.PREFILL:
            batch.extend_num_tokens, batch.extend_seq_lens_cpu = sum(counts), counts
            batch.extend_seq_lens = torch.tensor(counts, dtype=torch.int32)
            batch.extend_prefix_lens = torch.tensor(prefixes, dtype=torch.int32)
            batch.extend_prefix_lens_cpu = prefixes
            batch.extend_start_loc = torch.tensor([sum(counts[:n]) for n in range(total)], dtype=torch.int32)
        if kind is Kind.VERIFY:
            batch.spec_info = self._drafts(parts, one.padding)
        return batch

    def _drafts(self, parts: Sequence[Part], padding: int) -> Any:
        """Return what a verify says about its drafts. A tree is given as first child and next sibling of each row."""
        ragged = None
        if any(part.rows < self.drafts for part in parts):
            counts = [part.rows for part in parts] + [0] * padding
            starts = torch.tensor([sum(counts[:n]) for n in range(len(counts) + 1)], dtype=torch.int32)
            ragged = StandIn(qo_indptr_device=starts, bs=len(counts), cap=self.drafts)
        trees = [part.parents for part in parts] + [tuple(range(-1, self.drafts - 1))] * padding
        links = [_links(parents) for parents in trees] if self.tree else []
        return StandIn(
            draft_token_num=self.drafts,
            ragged_verify_layout=ragged,
            retrieve_next_token=torch.tensor([child for child, _ in links]) if links else None,
            retrieve_next_sibling=torch.tensor([sibling for _, sibling in links]) if links else None,
        )


def _links(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return each row's first child and next sibling, -1 for none."""
    child, sibling, last = [-1] * len(parents), [-1] * len(parents), [-1] * len(parents)
    for row, parent in enumerate(parents):
        if parent < 0:
            continue
        if last[parent] < 0:
            child[parent] = row
        else:
            sibling[last[parent]] = row
        last[parent] = row
    return child, sibling


def _with_padding(rows: Rows, count: int) -> Rows:
    """Append rows of padding requests, which hold NaN."""
    if not count:
        return rows
    parts = (rows.x, rows.gate, rows.b)
    return Rows(*(torch.cat([one, one.new_full((count, *one.shape[1:]), float("nan"))]) for one in parts))


def _kda_inputs(kind: Kind, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return beta and the gate as the release's Kimi model gives them: for prompts, beta may be past its sigmoid."""
    if kind is not Kind.PREFILL:
        return rows.b[None], rows.gate.flatten(1)[None]
    module = inspect.getmodule(member("srt.layers.attention.linear.kda_backend", "KDAAttnBackend"))
    raw = module is not None and "beta_is_raw" in inspect.getsource(module)
    return (rows.b if raw else rows.b.float().sigmoid())[None], rows.gate[None]
