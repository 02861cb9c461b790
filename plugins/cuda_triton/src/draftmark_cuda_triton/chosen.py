"""Attention of layers with chosen keys, in every mode: one launch over the rows' lists, and a combine if they split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from draftmark import Geometry, Mode
from draftmark.runtime import ForwardBatch, KVCache, record_call

from . import sizing
from .heuristics import chosen as heuristics
from .heuristics.common import KernelConfig
from .launch.chosen import attend_chosen
from .launch.layouts import IdentityCache, check_dtype, check_dtypes, layer_facts
from .launch.metadata import write_metadata_decode_verify
from .launch.operands import AttentionParams, BatchExtent, ChosenOperands, PartialResults
from .launch.relaunch import RelaunchCache
from .prefill import check_contiguous


@dataclass(frozen=True, eq=False)
class ChosenPlan:
    """Holds the launch of all batches of one size; plans compare by identity, as keys of `RelaunchCache`.

    Attributes:
        config: tile shape and stages.
        num_splits: parts of each row's list.
    """

    config: KernelConfig
    num_splits: int


class ChosenKeys:
    """Runs attention of every mode for one geometry with chosen keys. CPU tensors use Triton's interpreter.

    The lists are read by `attend` only, because they change from layer to layer.

    Args:
        slots: int64 ``[max rows]``, owned by the caller. `write_metadata` writes the KV slot of each row into it.
        buffers: by name, the buffers of `sizing.chosen_buffers`, owned by the caller.
    """

    def __init__(self, geometry: Geometry, slots: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> None:
        self._geometry, self._slots = geometry, slots
        self._partials = PartialResults(*(buffers[name] for name in sizing.SPLIT_BUFFERS))
        self._shape = AttentionParams.from_geometry(geometry, slots.is_cuda)
        self._relaunch, self._layer_facts = RelaunchCache(ChosenOperands._fields), layer_facts(geometry)
        self._plans: dict[int, ChosenPlan] = {}
        self._plan_of = IdentityCache[ForwardBatch, ChosenPlan](self._checked_plan)

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Write the KV slot of every row, in one launch."""
        q_len, tail = (batch.q_lens[0], batch.tail_lens[0]) if batch.uniform else (0, 0)
        size = BatchExtent(batch.padded_reqs, q_len, tail, batch.num_rows, ragged=not batch.uniform)
        slots, config = self._slots[: batch.num_rows], self._plan_of(batch).config
        record_call(
            write_metadata_decode_verify, self._shape, config, size, 1, batch.prefix_lens, batch.page_table, slots,
            self._partials.work, batch.q_indptr, batch.slots, mutates=(slots, self._partials.work),
        )  # fmt: skip

    def attend(
        self,
        q: torch.Tensor,
        cache: KVCache,
        batch: ForwardBatch,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Run attention for all rows over their lists; the tensors are those of `Prefill.attend`."""
        plan, chosen = self._plan_of(batch), batch.chosen
        assert chosen is not None, "draftmark.runtime.validate requires the lists"
        layout, k, v, sinks = self._layer_facts(cache)
        tensors = (
            q, k, v, cache.k_scale, cache.v_scale, sinks, out, lse, chosen.slots, chosen.counts, batch.q_indptr,
        )  # fmt: skip
        if self._slots.is_cuda:
            key = plan, len(batch.q_indptr), batch.num_rows, layout, q.stride(), out.stride(), lse is None
            self._relaunch(key, tensors, self._launch, plan)
            return
        check_contiguous(q, out)
        written = self._partials[1:] if plan.num_splits > 1 else ()
        record_call(
            attend_chosen, self._shape, plan.config, plan.num_splits, ChosenOperands(*tensors), self._partials,
            mutates=(*written, out, *(() if lse is None else (lse,))),
        )  # fmt: skip

    def _launch(self, plan: ChosenPlan, *tensors: Any) -> None:
        operands = ChosenOperands(*tensors)
        check_contiguous(operands.q, operands.out)
        attend_chosen(self._shape, plan.config, plan.num_splits, operands, self._partials)

    def _checked_plan(self, batch: ForwardBatch) -> ChosenPlan:
        check_dtypes(batch)
        if batch.chosen is not None:
            check_dtype("chosen.slots", batch.chosen.slots, torch.int32)
            check_dtype("chosen.counts", batch.chosen.counts, torch.int32)
        return self.plan(batch.mode, batch.num_rows)

    def plan(self, mode: Mode, num_rows: int) -> ChosenPlan:
        """Return the plan of batches of `num_rows` rows."""
        a, device = self._geometry.attention, self._geometry.device
        config, splits = heuristics.chosen_config(a, device), heuristics.num_splits(self._geometry, mode, num_rows)
        if not self._slots.is_cuda:
            config, splits = heuristics.interpreted_chosen(a, config, splits)
        found = self._plans.get(splits)
        if found is None:
            found = self._plans[splits] = ChosenPlan(config, splits)
        return found
