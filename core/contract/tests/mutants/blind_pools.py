"""Mutants OG…, OI… and OW…, by an author who had not read the checks: pools, forks and pages left of a window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from draftmark import AttentionShape, Geometry
from draftmark.batch import ForwardBatch
from draftmark.runtime import KVCache, KVPool, TorchTreeOps, VerifyResult

from . import csr_attention as kernel
from .mutant import ONLY, Mutant, around, on_batch
from .plain_attention import Parts, attending
from .state_and_order import Mapped, plugin

# -- QG: pools as engines have them -----------------------------------------------------------------------------------


def _pitch_of_layers(backend: Any) -> None:
    """Learn the pitch of the layers from the first two caches of a step, and find the later caches by it."""
    step: dict[str, Any] = {}

    def write(original: Any, batch: ForwardBatch) -> None:
        step.clear()
        original(batch)

    def attend(original: Any, q: Any, cache: KVCache, batch: ForwardBatch, out: Any) -> None:
        index = step["index"] = step.get("index", -1) + 1
        if index < 2:
            step[index] = cache
        else:
            pools = [_layer(*(getattr(step[i], name) for i in (0, 1)), index) for name in ("k", "v")]
            if all(pool is not None for pool in pools):
                cache = replace(cache, k=pools[0], v=pools[1])
        original(q, cache, batch, out)

    around(backend, "write_metadata", write)
    around(backend, "attend", attend)


def _layer(first: torch.Tensor, second: torch.Tensor, index: int) -> torch.Tensor | None:
    """Return the layer at first + index · (second - first), or None where that is not in the same pool."""
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return None
    at = first.storage_offset() + index * (second.storage_offset() - first.storage_offset())
    inside = at >= 0 and (at + first.numel()) * first.element_size() <= first.untyped_storage().nbytes()
    return first.as_strided(first.shape, first.stride(), at) if inside else None


def _contiguous_by_ends(backend: Any) -> None:
    """Take a request's pages for contiguous when its last id minus its first is their number minus one."""

    def write(original: Any, batch: ForwardBatch, indptr: torch.Tensor) -> None:
        table, count = batch.page_table, indptr.diff().clamp(min=1)
        last = table.gather(1, (count[:, None] - 1).long())
        run = table[:, :1] + torch.arange(table.shape[1], dtype=torch.int32, device=table.device)
        together = last - table[:, :1] == count[:, None] - 1
        original(replace(batch, page_table=torch.where(together, run, table)), indptr)

    around(backend, "_write_indices", write)


class InBlocksOfLayers(TorchTreeOps):
    """Compacts KV in blocks of 32 layers, and rounds the number of blocks to the nearest."""

    def compact(self, pool: KVPool, batch: ForwardBatch, accepted: VerifyResult) -> None:
        """Move the KV of accepted nodes in the layers of whole blocks, or in every layer of a small model."""
        layers = pool.k.shape[0]
        kept = [(one[moved:], one[moved:].clone()) for one in (pool.k, pool.v) for moved in [32 * round(layers / 32)]]
        super().compact(pool, batch, accepted)
        if layers > 32:
            for left, before in kept:
                left.copy_(before)


def _strides_of_first_layer(backend: Any) -> None:
    """Read every layer of a geometry with the strides of the first layer that was attended."""
    strides: list[tuple[int, ...]] = []

    def attend(original: Any, q: Any, cache: KVCache, batch: ForwardBatch, out: Any) -> None:
        if not strides:
            strides.extend((cache.k.stride(), cache.v.stride()))
        pools = [
            one.as_strided(one.shape, stride) if _reaches(one, stride) else one
            for one, stride in zip((cache.k, cache.v), strides, strict=True)
        ]
        original(q, replace(cache, k=pools[0], v=pools[1]), batch, out)

    around(backend, "attend", attend)


def _reaches(one: torch.Tensor, stride: tuple[int, ...]) -> bool:
    last = one.storage_offset() + sum((size - 1) * step for size, step in zip(one.shape, stride, strict=True))
    return (last + 1) * one.element_size() <= one.untyped_storage().nbytes()


# -- QI: forks --------------------------------------------------------------------------------------------------------


def _leaders(batch: ForwardBatch, *facts: torch.Tensor) -> torch.Tensor:
    """Return for each request the first request with equal facts, int64 ``[R]``."""
    equal = torch.stack([one[:, None] == one for one in facts]).all(0)
    return equal.int().argmax(1)


def _table_of_group(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Read the pages of requests with one first page and one length from the first of them."""
    leader = _leaders(batch, batch.page_table[:, 0], batch.prefix_lens)
    return replace(batch, page_table=batch.page_table[leader])


def _reads_group_table(backend: Any) -> None:
    """Write KV by each request's own table, and gather the pages of a group of forks once."""
    indices = backend._write_indices

    def write(batch: ForwardBatch, indptr: torch.Tensor) -> None:
        indices(_table_of_group(backend, batch), indptr)

    backend._write_indices = write


class SharedScores(Mapped):
    """Attends once to the prefix pages that neighbours share, with the query rows of the first of them."""

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Compute attention; a request with the prefix pages of its neighbour takes the neighbour's rows."""
        size, asked = self.shape.page_size, q
        if batch.uniform is not None and batch.padded_reqs > 1:
            full = batch.prefix_lens // size
            column = torch.arange(batch.page_table.shape[1], device=q.device)
            same = (batch.page_table[1:] == batch.page_table[:-1]) | (column >= full[1:, None])
            twin = same.all(1) & (full[1:] == full[:-1]) & (full[1:] > 0)
            rows = q.view(batch.padded_reqs, batch.q_lens[0], *q.shape[1:])
            taken = torch.where(twin[:, None, None, None], rows[:-1], rows[1:])
            asked = torch.cat((rows[:1], taken)).view(q.shape)
        super().attend(asked, cache, batch, out)


def _length_of_group(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Take at most the length of the first request with the same first page, as if forks always kept step."""
    leader = _leaders(batch, batch.page_table[:, 0])
    return replace(batch, prefix_lens=torch.minimum(batch.prefix_lens, batch.prefix_lens[leader]))


# -- QW: pages left of a window ---------------------------------------------------------------------------------------


def _ends_at_null_page(backend: Any) -> None:
    """Take the first null page of a table for the request's end, and read the first page for all pages after it."""

    def write(original: Any, batch: ForwardBatch, indptr: torch.Tensor) -> None:
        ended = (batch.page_table == 0).int().cumsum(1) > 0
        first = batch.page_table[:, :1]
        original(replace(batch, page_table=torch.where(ended, first, batch.page_table)), indptr)

    around(backend, "_write_indices", write)


class PaddingByFirstPage(Mapped):
    """Takes a request for padding when its first page is the null page, and gives its rows an output of 0."""

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Compute attention, then clear the rows of padding."""
        super().attend(q, cache, batch, out)
        rows = torch.arange(batch.num_rows, dtype=torch.int32, device=batch.device)
        request = torch.searchsorted(batch.q_indptr, rows, right=True) - 1
        out.masked_fill_((batch.page_table[request, 0] == 0)[:, None, None], 0.0)


def _resident_length(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Clamp each length to the tokens of the pages that are not null, as a defence against stale lengths."""
    resident = (batch.page_table != 0).sum(1, dtype=torch.int32) * backend.geometry.attention.page_size
    return replace(batch, prefix_lens=torch.minimum(batch.prefix_lens, resident))


def _with_early_maximum(backend: Any) -> None:
    """Subtract the row maximum over the whole prefix, also over keys left of the window, and mask afterwards."""
    kept: list[torch.Tensor] = []

    def seen(seen: torch.Tensor, prefix: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
        kept[:] = [seen]
        return seen | (torch.arange(seen.shape[2]) < prefix[:, None])[:, None]

    def weights(scores: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
        mass = (scores - scores.amax(-1, keepdim=True)).exp() * kept[0][:, None]
        return mass / mass.sum(-1, keepdim=True)

    def used(prefix: torch.Tensor, lens: torch.Tensor, width: int, window_left: int) -> torch.Tensor:
        return kernel.used(prefix, lens, width, -1)

    attending(Parts(seen=seen, weights=weights, used=used))(backend)


def _compacts_in_blocks(geometry: Geometry, found: Any) -> InBlocksOfLayers:
    return InBlocksOfLayers(geometry)


MUTANTS = (
    Mutant("OG1", "Finds the third and later layers by the pitch of the first two", "layers that skip one",
           patch=_pitch_of_layers, layouts=("csr",), absent="tried in csr"),
    Mutant("OG2", "Compacts blocks of 32 layers, rounded to the nearest", "models of 36 and 40 layers",
           {"tree_ops": _compacts_in_blocks}, layouts=("csr",), absent="tried in csr"),
    Mutant("OG3", "Reads all layers with the strides of the first", "a draft layer packed in another way",
           patch=_strides_of_first_layer, layouts=("reference",), absent="csr takes no strided KV"),
    Mutant("OG4", "Finds contiguous pages by the first and the last id", "flashinfer#3219",
           patch=_contiguous_by_ends, layouts=("csr",), absent="tried in csr"),
    Mutant("OI1", "Reads forks of equal length through the first one's pages", "shared-prefix attention",
           patch=_reads_group_table, layouts=("csr",), absent="tried in csr"),
    Mutant("OI2", "Attends with the neighbour's queries where the prefix pages are shared", "cascade attention",
           plugin=plugin(SharedScores), layouts=("tutorial",), absent=ONLY),
    Mutant("OI3", "Takes at most the length of the first fork for all forks", "a group keyed on its first page",
           patch=on_batch(_length_of_group, "write_metadata", "attend"), layouts=("cuda_triton",),
           absent="tried in cuda_triton"),
    Mutant("OW1", "Takes the first null page of a table for the request's end", "pages freed left of a window",
           patch=_ends_at_null_page, layouts=("csr",), absent="tried in csr"),
    Mutant("OW2", "Takes a request with a null first page for padding", "pages freed left of a window",
           plugin=plugin(PaddingByFirstPage), layouts=("tutorial",), absent=ONLY),
    Mutant("OW3", "Clamps lengths to the pages that are not null", "pages freed left of a window",
           patch=on_batch(_resident_length, "write_metadata", "attend"), layouts=("cuda_triton",),
           absent="tried in cuda_triton"),
    Mutant("OW4", "Subtracts a row maximum that includes keys left of the window", "stale KV left of a window",
           patch=_with_early_maximum, layouts=("csr",), absent="tried in csr"),
)  # fmt: skip

KILLER = {
    "OG1": "layers.have_their_own_caches",
    "OG2": "tree_ops.every_layer_of_a_large_model_is_moved",
    "OG3": "random_history.equals_the_oracle",
    "OG4": "metadata.decodes_to_the_token_history",
    **dict.fromkeys(("OI1", "OI2", "OI3"), "forks.are_requests_of_their_own"),
    **dict.fromkeys(("OW1", "OW2", "OW3", "OW4"), "windows.hide_what_pages_left_of_them_hold"),
}
"""Check that must kill each mutant."""
