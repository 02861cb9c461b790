"""Backend object of the plugin: plan, write_metadata, write_kv and attend, over the arena's buffers."""

from __future__ import annotations

import torch

from draftmark import AttentionShape, Geometry, Mode
from draftmark.runtime import Arena, ForwardBatch, KVCache

from . import sizing
from .chosen import ChosenKeys
from .decode_verify import DecodeVerify
from .heuristics import select
from .heuristics.chosen import chosen_config
from .kv_write import KvWriter
from .launch.cuda_driver import driver
from .launch.layouts import IdentityCache, kv_facts
from .prefill import Prefill
from .prefill_fp8 import PrefillFp8
from .switches import logger, uses_own_launch

EXTEND = Mode.EXTEND
"""Module-level alias of the enum member: every layer reads it, and enum lookup is slow in Python 3.11."""


class TritonBackend:
    """Attention backend with one code path for eager mode, CUDA graph capture and replay.

    It needs no host lengths and never copies device data to the host. On the CPU every launch goes through
    `record_call`, so a recorded graph replays the launch as one kernel.
    """

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        self.geometry = geometry
        self.arena = arena
        self._slots = arena[sizing.SLOTS]
        self._slots_of = IdentityCache[ForwardBatch, torch.Tensor](lambda batch: self._slots[: batch.num_rows])
        self._kv_facts, self._writer = kv_facts(geometry), KvWriter()
        buffers = {name: arena[name] for name in arena}
        self._chosen = ChosenKeys(geometry, self._slots, buffers) if geometry.attention.chosen_width else None
        logger.info("%s for %s", *_summary(geometry, self._slots.is_cuda))
        if self._chosen is not None:
            return
        if EXTEND in geometry.modes:
            prefill = PrefillFp8 if sizing.upcasts(geometry) else Prefill
            self._prefill = prefill(geometry, self._slots, arena[sizing.ROW_TILES], buffers)
        if sizing.decode_verify_modes(geometry):
            self._decode_verify = DecodeVerify(geometry, self._slots, buffers)

    def plan(self, batch: ForwardBatch) -> None:
        """Do nothing: the schedule is computed on the device by `write_metadata`."""

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Write the KV slot of every row and the tile schedule, in one launch."""
        self._attention_of(batch).write_metadata(batch)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor | None, cache: KVCache, batch: ForwardBatch) -> None:
        """Scatter new K and V rows, or latent rows, to their cache slots in one launch, quantized to e4m3 if needed."""
        self._writer.write_layer(k, v, cache, self._kv_facts(cache), self._slots_of(batch))

    def attend(
        self,
        q: torch.Tensor,
        cache: KVCache,
        batch: ForwardBatch,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Run attention for all rows: one launch, and a combine launch if KV is split.

        Prefill over an e4m3 cache can upcast K and V first, in further launches; see `prefill_fp8`.
        """
        self._attention_of(batch).attend(q, cache, batch, out, lse)

    def _attention_of(self, batch: ForwardBatch) -> Prefill | PrefillFp8 | DecodeVerify | ChosenKeys:
        """Return the implementation that serves the batch's mode, or every mode of a layer with chosen keys."""
        if self._chosen is not None:
            return self._chosen
        return self._prefill if batch.mode is EXTEND else self._decode_verify


def _summary(geometry: Geometry, on_gpu: bool) -> tuple[str, AttentionShape]:
    """Return the family of kernels that serves a geometry and how they are launched, then the attention shape."""
    a = geometry.attention
    if not on_gpu:
        return "interpreted kernels", a
    config = chosen_config(a, geometry.device) if a.chosen_width else select.select_config(a, geometry.device, 1)
    family = "Hopper kernels" if config.kernel.is_sm90 else "portable kernels"
    through = "the CUDA driver" if uses_own_launch() and driver() is not None else "Triton's launcher"
    return f"{family}, launched through {through},", a
