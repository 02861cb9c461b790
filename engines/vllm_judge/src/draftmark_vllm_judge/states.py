"""Driver of vLLM's layers with recurrent state. A request holds a row of state columns and an accepted count.

Row t of a verify leaves its state in column t of the request's row of the block table. The next forward starts from
column ``accepted - 1``. The convolution's window lies in column 0 only, at an offset of ``accepted - 1``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from draftmark_contract.judge.states.driver import Kind, Round
from draftmark_contract.judge.states.layer import Family, Layer, Rows, Weights

from .config import takes
from .state_layers import LENGTH, StateLayer

NULL = 0
"""vLLM's null block."""


class StateColumns:
    """Runs one of vLLM's layers, with the tensors that its model runner keeps."""

    def __init__(self, layer: Layer, weights: Weights, drafts: int, requests: int) -> None:
        self.family, self.shape, self.drafts = layer.family, layer.shape, drafts
        self._window = layer.window
        self.home = StateLayer(layer, weights, drafts, requests)
        blocks = torch.arange(1, 1 + requests * drafts, dtype=torch.int32)
        self._columns = blocks.view(requests, drafts).flip(0)
        self._accepted = [1] * requests
        self._length = [0] * requests

    def start(self, request: int) -> None:
        """Give the request its columns. vLLM does not zero them."""
        self._accepted[request], self._length[request] = 1, 0

    def run(self, one: Round, rows: Rows) -> torch.Tensor:
        """Build metadata as vLLM's runner does, and run the layer's core."""
        metadata = self._metadata(one)
        with self.home.forward(metadata, one.rows):
            out = self._gdn(rows) if self.family is Family.GDN else self._mamba2(rows)
        for part in one.parts:
            self._length[part.request] += part.rows if part.kind is not Kind.VERIFY else 0
            self._accepted[part.request] = 1
        return out.clone().view(one.rows, self.shape.num_heads, self.shape.value_dim)

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Remember the accepted counts. vLLM moves nothing."""
        for request, path in paths.items():
            assert list(path) == list(range(len(path))), "vLLM's drafts are chains"
            self._accepted[request] = len(path)
            self._length[request] += len(path)

    def state(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the next forward starts from."""
        column = self._accepted[request] - 1
        first = int(self._columns[request, 0])
        window = self.home.conv[first, :, column : column + self._window]
        state = self.home.state[int(self._columns[request, column])].clone()
        if self.family is Family.GDN:  # vLLM's CPU kernels keep keys before values in the memory of this shape.
            state = state.view(self.shape.num_heads, self.shape.key_dim, self.shape.value_dim).transpose(1, 2)
        return state, window.clone()

    def others(self, requests: Sequence[int]) -> torch.Tensor:
        """Return the blocks of other requests."""
        kept = torch.ones(len(self.home.raw), dtype=torch.bool)
        kept[NULL] = False
        kept[self._columns[list(requests)].flatten().long()] = False
        return self.home.raw[kept].clone()

    def _metadata(self, one: Round) -> Any:
        from .api import CommonAttentionMetadata

        parts, total = one.parts, len(one.parts) + one.padding
        rows = [part.rows for part in parts] + [0] * one.padding
        starts = torch.tensor([sum(rows[:n]) for n in range(total + 1)], dtype=torch.int32)
        lens = [self._length[part.request] + part.rows for part in parts] + [0] * one.padding
        seq_lens = torch.tensor(lens, dtype=torch.int32)
        table = torch.full((total, self.drafts), NULL, dtype=torch.int32)
        for number, part in enumerate(parts):
            table[number] = self._columns[part.request]
        prefilling = torch.tensor([part.kind is Kind.PREFILL for part in parts] + [False] * one.padding)
        values = {
            "query_start_loc": starts,
            "query_start_loc_cpu": starts.clone(),
            "seq_lens": seq_lens,
            "num_reqs": total,
            "num_actual_tokens": one.rows,
            "max_query_len": max(rows),
            "max_seq_len": LENGTH,
            "block_table_tensor": table,
            "slot_mapping": torch.full((one.rows,), -1, dtype=torch.int64),
            "is_prefilling": prefilling,
            "seq_lens_cpu_upper_bound": seq_lens.clone(),
            "_seq_lens_cpu": seq_lens.clone(),
            "_num_computed_tokens_cpu": seq_lens - starts.diff(),
        }
        common = CommonAttentionMetadata(**takes(CommonAttentionMetadata, values))
        # A verify of one row counts as a row of drafts too. Prompts and padding have -1.
        drafts = [part.rows - 1 if part.kind is Kind.VERIFY else -1 for part in parts] + [-1] * one.padding
        accepted = [self._accepted[part.request] for part in parts] + [1] * one.padding
        with self.home.current():
            return self.home.builder.build(
                0,
                common,
                num_accepted_tokens=torch.tensor(accepted, dtype=torch.int32),
                num_decode_draft_tokens_cpu=torch.tensor(drafts, dtype=torch.int32),
            )

    def _gdn(self, rows: Rows) -> torch.Tensor:
        out = torch.zeros(len(rows.x), self.shape.num_heads, self.shape.value_dim, dtype=rows.x.dtype)
        torch.ops.vllm.cpu_gdn_attention_core(rows.x, rows.b, rows.gate, out, self.home.prefix)
        return out

    def _mamba2(self, rows: Rows) -> torch.Tensor:
        width = self.shape.num_heads * self.shape.value_dim
        out = torch.zeros(len(rows.x), width, dtype=rows.x.dtype)
        gates = torch.zeros(len(rows.x), width, dtype=rows.x.dtype)
        self.home.layer.conv_ssm_forward(torch.cat([gates, rows.x, rows.gate], 1), out)
        return out
