"""The step path: four plain methods over the arena's buffers and the batch's own tensors."""

from __future__ import annotations

import torch

from draftmark import Geometry, Mode
from draftmark.runtime import Arena, ForwardBatch, KVCache

from . import sizing
from .decode_verify import DecodeVerify
from .heuristics import upcast
from .kv_write import write_kv_layer
from .launch.layouts import IdentityCache
from .prefill import Prefill
from .prefill_fp8 import PrefillFp8

EXTEND = Mode.EXTEND
"""As a name of the module: every layer asks, and Python 3.11 takes four times as long to find an enum's member."""


class TritonBackend:
    """One code path for eager, capture and replay. Needs no host lengths and never reads the device on the host.

    Every launch goes through `record_call`, so that a recorded graph on the CPU replays it as one kernel.
    """

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        self.geometry = geometry
        self.arena = arena
        self._slots = arena[sizing.SLOTS]
        self._slots_of = IdentityCache[ForwardBatch, torch.Tensor](lambda batch: self._slots[: batch.num_rows])
        buffers = {name: arena[name] for name in arena}
        if EXTEND in geometry.modes:
            prefill = PrefillFp8 if upcast.upcasts(geometry.attention, geometry.device) else Prefill
            self._prefill = prefill(geometry, self._slots, arena[sizing.ROW_TILES], buffers)
        if sizing.decode_verify_modes(geometry):
            self._decode_verify = DecodeVerify(geometry, self._slots, buffers)

    def plan(self, batch: ForwardBatch) -> None:
        """Nothing: the schedule is made on the device."""

    def write_metadata(self, batch: ForwardBatch) -> None:
        """The KV slot of every row and the schedule, in one launch."""
        self._attention_of(batch).write_metadata(batch)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: ForwardBatch) -> None:
        """Scatter the rows to their slots, K and V in one launch, quantised where the cache is."""
        write_kv_layer(k, v, cache, self._slots_of(batch))

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Attention of all rows: one launch, and a merge where work is cut by keys; over e4m3 see `prefill_fp8` too."""
        self._attention_of(batch).attend(q, cache, batch, out)

    def _attention_of(self, batch: ForwardBatch) -> Prefill | PrefillFp8 | DecodeVerify:
        """Whose launches a batch's are."""
        return self._prefill if batch.mode is EXTEND else self._decode_verify
