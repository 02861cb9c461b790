"""Every compiled kernel that a geometry can launch, listed without a GPU.

The list comes from the host launch code itself: `kernels_of` runs it on tensors without memory, for each batch size and
mode of the geometry, and collects the calls of `launcher.launch_kernel`. `kernel_spec` turns a call into types,
constants and alignments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch

from draftmark import PLAIN_ROWS, BufferSpec, Form, Geometry, Mode

from . import prefill_fp8, sizing, tree_ops
from .chosen import ChosenKeys
from .decode_verify import DecodeVerify
from .heuristics import select, split_kv, upcast
from .kernel_spec import KernelSpec, spec_of
from .kv_write import launch_write_kv
from .launch.attention import attend_decode_verify
from .launch.chosen import attend_chosen
from .launch.launcher import LAUNCHER, KernelCall
from .launch.layouts import latent_operands
from .launch.metadata import write_metadata_decode_verify, write_metadata_prefill
from .launch.operands import (
    BLOCK,
    CAUSAL,
    TREE,
    AttentionParams,
    BatchExtent,
    ChosenOperands,
    Operands,
    PartialResults,
)
from .prefill import Prefill, has_adjacent_heads, has_tma_boxes, has_uniform_row_stride

PAGES = 4
"""Pages of a stand-in cache. No kernel is specialized on their number."""


class _StandIn(torch.Tensor):
    """Tensor without memory that the launch code treats as a GPU tensor; its address is 0, so it is aligned."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class _Operands(NamedTuple):
    """Holds stand-ins of a layer's K and V as in `layouts.LayerFacts`, their scales, and attention sinks."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    sinks: torch.Tensor | None


def stand_in(*shape: int, dtype: str = "int32") -> torch.Tensor:
    """Return a tensor without memory that the launch code treats as a GPU tensor."""
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta").as_subclass(_StandIn)


def stand_in_buffers(specs: list[BufferSpec]) -> dict[str, torch.Tensor]:
    """Return stand-ins of buffers by name."""
    return {one.name: stand_in(*map(int, one.shape), dtype=one.dtype) for one in specs}


@dataclass(frozen=True)
class EngineUse:
    """Facts of an engine that a geometry does not fix.

    Attributes:
        adjacent_heads: the heads of a token are adjacent in the KV cache; otherwise the tokens of a head are.
        interleaved: the pages of K and V alternate in memory. None lists both; they differ only for the Triton kernels
            on sm_90 and newer, which load contiguous pages by TMA.
        scaled: K and V have scales. None: if the cache is e4m3.
        tree_tails: draft tokens are verified with a `Tree` tail, otherwise with a `Causal` one. None: if topk is above
            1.
        lse: `attend` also writes log-sum-exps. Both kinds of kernels are listed then.
    """

    adjacent_heads: bool = True
    interleaved: bool | None = None
    scaled: bool | None = None
    tree_tails: bool | None = None
    lse: bool = False


def kernels_of(
    geometry: Geometry,
    arch: int | None = None,
    use: EngineUse = EngineUse(),
    trees: bool = True,
) -> list[KernelSpec]:
    """Return every compiled kernel that a backend of this geometry can launch; arguments as in `calls_of`."""
    return list(calls_of(geometry, arch, use, trees))


def calls_of(
    geometry: Geometry,
    arch: int | None = None,
    use: EngineUse = EngineUse(),
    trees: bool = True,
) -> dict[KernelSpec, KernelCall]:
    """Return one call of `launcher.launch_kernel` for each compiled kernel of a geometry.

    Args:
        geometry: shape, limits and modes; a device of another kind counts as a GPU with its number of SMs.
        arch: compute capability times ten, for example 90; None takes the geometry's.
        use: facts of the engine.
        trees: include the tree operations (`tree_ops`), which only the decoding loop launches.
    """
    device = replace(geometry.device, kind="cuda", arch=geometry.device.arch if arch is None else arch)
    geometry = replace(geometry, device=device)
    found: dict[KernelSpec, KernelCall] = {}
    either = (False, True) if use.interleaved is None else (use.interleaved,)
    with LAUNCHER.collect(lambda call: found.setdefault(spec_of(call, device.arch), call)):
        for interleaved in either:
            launch_all(geometry, replace(use, interleaved=interleaved), trees)
    return found


def launch_all(geometry: Geometry, use: EngineUse, trees: bool) -> None:
    """Call the launch code of every mode and batch size."""
    a = geometry.attention
    plain = a.row_format == PLAIN_ROWS
    has_scales = plain and (a.kv_dtype != a.q_dtype if use.scaled is None else use.scaled)
    scale = stand_in(1, dtype="float32") if has_scales else None
    k, v = _latent_cache(geometry) if a.latent else _caches(geometry, use)
    new = stand_in(1, a.num_kv_heads, a.head_dim, dtype=a.q_dtype)
    new_v = None if a.latent else stand_in(1, a.num_kv_heads, a.value_width, dtype=a.q_dtype)
    if Form.ENGINE_STORES not in geometry.forms:
        launch_write_kv(new, new_v, k, v, scale, scale, stand_in(1, dtype="int64"), geometry.device.arch >= 90)
    kv = _Operands(k, v, scale, scale, stand_in(a.num_qo_heads, dtype="float32") if a.sinks else None)
    slots = stand_in(int(geometry.max_rows_any), dtype="int64")
    if a.chosen_width:
        _launch_chosen(geometry, slots, kv, use.lse)
    elif Mode.EXTEND in geometry.modes:
        _launch_prefills(geometry, slots, kv, use.lse)
    if sizing.decode_verify_modes(geometry) and not a.chosen_width:
        tree_tails = geometry.draft.topk > 1 if use.tree_tails is None else use.tree_tails
        _launch_decodes(geometry, slots, kv, tree_tails, use.lse)
    if trees:
        _launch_tree_ops(geometry)


def _caches(geometry: Geometry, use: EngineUse) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of a stand-in cache, ``[pages, P, KV heads, elements]``."""
    a, apart = geometry.attention, (PAGES, 2) if use.interleaved else (PAGES,)

    def cache(dim: int) -> torch.Tensor:
        page = (a.page_size, a.num_kv_heads, dim) if use.adjacent_heads else (a.num_kv_heads, a.page_size, dim)
        pages = stand_in(*apart, *page, dtype=a.kv_dtype)
        pages = pages[:, 0] if use.interleaved else pages
        return (pages if use.adjacent_heads else pages.transpose(1, 2)).as_subclass(_StandIn)

    return cache(a.head_dim), cache(a.value_width)


def _latent_cache(geometry: Geometry) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both parts of the rows of a stand-in latent cache."""
    a, width = geometry.attention, geometry.attention.value_width
    if Form.LATENT_PARTS in geometry.forms:
        parts = [stand_in(PAGES, a.page_size, dim, dtype=a.kv_dtype) for dim in (width, a.head_dim - width)]
    else:
        rows = stand_in(PAGES, a.page_size, a.row_width, dtype=a.kv_dtype)
        parts = [rows[..., :width], rows[..., width:]]
    value, rest = latent_operands(*[part.unsqueeze(2) for part in parts])
    return value.as_subclass(_StandIn), rest.as_subclass(_StandIn)


def _lses(geometry: Geometry, rows: int, lse: bool) -> list[torch.Tensor | None]:
    """Return stand-ins of the lse of a batch: None, and with `lse` a tensor too."""
    return [None, stand_in(rows, geometry.attention.num_qo_heads, dtype="float32")] if lse else [None]


def _launch_decodes(geometry: Geometry, slots: torch.Tensor, kv: _Operands, tree_tails: bool, lse: bool) -> None:
    """Call the launch code of metadata and attention for every mode except EXTEND."""
    a, device, modes = geometry.attention, geometry.device, sizing.decode_verify_modes(geometry)
    own = stand_in_buffers(sizing.decode_verify_buffers(geometry, modes))
    shape, attention = AttentionParams.from_geometry(geometry, True), DecodeVerify(geometry, slots, own)
    partials = PartialResults(*(own[name] for name in sizing.SPLIT_BUFFERS))
    adjacent, uniform = has_adjacent_heads(kv.k, kv.v), has_uniform_row_stride(kv.k, kv.v)
    launched = set()
    kinds = [(mode, kind) for mode in modes for kind in _tail_kinds(geometry, mode, tree_tails)]
    for (mode, tail), num_reqs in product(kinds, range(1, int(geometry.max_reqs) + 1)):
        q_len = int(geometry.extent(mode).q_len)
        ragged, whole = mode is Mode.RAGGED_VERIFY, geometry.limits.batch_invariant
        extent = BatchExtent(num_reqs, q_len, q_len, num_reqs * q_len, ragged, whole)
        config, num_splits = attention.choose_splits(extent)
        size = config, num_splits > 1, num_splits // num_reqs, q_len, ragged, tail
        if size in launched:
            continue
        launched.add(size)
        lens, indptr, table = stand_in(num_reqs), stand_in(num_reqs + 1), _table(geometry, num_reqs)
        q, out = (
            stand_in(extent.num_rows, a.num_qo_heads, dim, dtype=a.q_dtype) for dim in (a.head_dim, a.value_width)
        )
        write_metadata_decode_verify(shape, config, extent, num_splits, lens, table, slots, partials.work, indptr)
        mask, depth = None, None
        if tail == TREE:
            mask, depth = stand_in(extent.num_rows, int(geometry.mask_words)), stand_in(extent.num_rows)
        boxes = has_tma_boxes(kv.k, kv.v, heads=config.kv_heads_per_tile if adjacent else 1)
        # An engine can pass q of latent rows with pitches that the Hopper kernels cannot load (`has_aligned_rows`,
        # `tma.has_flat_rows`).
        either = {(boxes, True), (boxes and not a.latent, True), (boxes, not a.latent)}
        for (loads, flat), fast_memory, own_lse in product(
            sorted(either), (True, False), _lses(geometry, extent.num_rows, lse)
        ):
            adapted = select.adapt_to_cache(a, device, config, uniform, loads, adjacent, fast_memory, flat)
            operands = Operands(q, *kv, out, own_lse, lens, indptr, table, mask, depth)
            attend_decode_verify(shape, adapted, extent, num_splits, operands, partials, tail == BLOCK)


def _tail_kinds(geometry: Geometry, mode: Mode, tree_tails: bool) -> tuple[int, ...]:
    """Return the kinds of tails that batches of a mode have."""
    if mode is Mode.DRAFT_BLOCK:
        return BLOCK, CAUSAL
    if mode is Mode.DRAFT:  # branches must see only their own ancestors
        return (TREE,) if geometry.draft.topk > 1 else (CAUSAL,)
    return (TREE,) if tree_tails and mode in (Mode.VERIFY, Mode.RAGGED_VERIFY) else (CAUSAL,)


def _table(geometry: Geometry, num_reqs: int) -> torch.Tensor:
    return stand_in(num_reqs, int(geometry.max_pages_per_req))


def _launch_prefills(geometry: Geometry, slots: torch.Tensor, kv: _Operands, lse: bool) -> None:
    """Call the launch code of metadata, upcast and attention for EXTEND."""
    a = geometry.attention
    own = stand_in_buffers(sizing.split_buffers(geometry, [], True) + sizing.upcast_buffers(geometry))
    row_tiles = stand_in(64, 2)
    _launch_prefill(geometry, Prefill(geometry, slots, row_tiles, own), kv, a.page_size, lse)
    if not sizing.upcasts(geometry):
        return
    for groups in upcast.head_group_counts(a):
        group = prefill_fp8.UpcastHeads(geometry, slots, row_tiles, own, groups)
        part = [one[:, :, : group.heads].as_subclass(_StandIn) for one in kv[:2]]
        group.launch(2, *part, stand_in(1), stand_in(2), _table(geometry, 1))
        own_geometry = replace(geometry, attention=upcast.upcast_shape(a, groups))
        _launch_prefill(own_geometry, group.prefill, kv._replace(k=group.k, v=group.v), a.page_size, lse)


def _launch_prefill(geometry: Geometry, prefill: Prefill, kv: _Operands, page_size: int, lse: bool) -> None:
    """Call the launch code of metadata and attention for EXTEND over given K and V.

    The kernels depend on the plan only. The combine also depends on the splits of a row tile, so batches have one row
    tile, one for each 8 splits, and more than splits.
    """
    a = geometry.attention
    shape = replace(AttentionParams.from_geometry(geometry, True), page_size=page_size)
    lens, indptr, table, tiles = stand_in(1), stand_in(2), _table(geometry, 1), stand_in(64, 2)
    batches = [
        (plan, num_tiles)
        for plan in prefill.plans()
        for num_tiles in (1, max(1, plan.split.num_splits // 8) if plan.split else 8, 2 * split_kv.MAX_SPLIT_ROW_TILES)
    ]
    for plan, num_tiles in batches:
        schedule = () if plan.split is None else (plan.split.partials.work, plan.split.num_splits, plan.split.num_ctas)
        rows = max(1, (num_tiles - 1) * plan.config.block_m // a.group_size)
        q, out = (stand_in(rows, a.num_qo_heads, dim, dtype=a.q_dtype) for dim in (a.head_dim, a.value_width))
        slots = stand_in(rows, dtype="int64")
        write_metadata_prefill(shape, plan.config, rows, lens, indptr, table, slots, tiles, None, *schedule)
        for own_lse in _lses(geometry, rows, lse):
            operands = Operands(q, *kv, out, own_lse, lens, indptr, table)
            prefill.launch(rows, plan.config, operands, tiles, plan.split)


def _launch_chosen(geometry: Geometry, slots: torch.Tensor, kv: _Operands, lse: bool) -> None:
    """Call the launch code of metadata and attention for every number of rows, with chosen keys."""
    a, own = geometry.attention, stand_in_buffers(sizing.chosen_buffers(geometry))
    shape, attention = AttentionParams.from_geometry(geometry, True), ChosenKeys(geometry, slots, own)
    partials = PartialResults(*(own[name] for name in sizing.SPLIT_BUFFERS))
    lens, indptr, table = stand_in(1), stand_in(2), _table(geometry, 1)
    plans = dict.fromkeys(
        attention.plan(mode, rows) for mode in geometry.modes for rows in range(1, int(geometry.max_rows(mode)) + 1)
    )
    for plan, own_lse in product(plans, _lses(geometry, 1, lse)):
        extent = BatchExtent(1, 1, 1, 1)
        write_metadata_decode_verify(shape, plan.config, extent, 1, lens, table, slots, partials.work, indptr)
        q, out = (stand_in(1, a.num_qo_heads, dim, dtype=a.q_dtype) for dim in (a.head_dim, a.value_width))
        operands = ChosenOperands(q, *kv, out, own_lse, stand_in(1, a.chosen_width), stand_in(1), indptr)
        attend_chosen(shape, plan.config, plan.num_splits, operands, partials)


def _launch_tree_ops(geometry: Geometry) -> None:
    """Call the launch code of the tree operations."""
    a, nodes, words = geometry.attention, int(geometry.draft.num_draft_tokens), int(geometry.mask_words)
    lens, positions, parents = stand_in(1), stand_in(nodes, dtype="int64"), stand_in(1, nodes, dtype="int64")
    mask, depth, last = stand_in(nodes, words), stand_in(1, nodes), geometry.limits.max_context_len - 1
    tree_ops.launch_write_tail(1, nodes, nodes, last, words, parents, lens, mask, depth, positions)
    tree_ops.launch_verify_tree(parents, parents, parents, parents, stand_in(1, dtype="int64"), parents)
    pools = [stand_in(2, PAGES, a.page_size, a.num_kv_heads, dim, dtype=a.kv_dtype) for dim in _pool_widths(geometry)]
    rows: list[torch.Tensor] = [tree_ops.words_of(pool).as_subclass(_StandIn) for pool in pools]
    for moved in tree_ops.moved_together(rows):
        tree_ops.launch_compact(
            a.page_size, moved[0], moved[-1], parents, stand_in(1, dtype="int64"), lens, _table(geometry, 1)
        )


def _pool_widths(geometry: Geometry) -> list[int]:
    """Return the elements of a head in each tensor of a `KVPool`."""
    a = geometry.attention
    if not a.latent:
        return [a.head_dim, a.value_width]
    parts = Form.LATENT_PARTS in geometry.forms
    return [a.value_width, a.head_dim - a.value_width] if parts else [a.row_width]
