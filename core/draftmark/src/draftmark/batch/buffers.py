"""Creates batches: over static buffers for captured graphs, or with new tensors for EXTEND (ragged prefill)."""

from __future__ import annotations

from itertools import accumulate
from typing import cast

import torch

from ..batch_tensors import batch_tensors
from ..devices import present_device
from ..geometry import Extent, Geometry, Mode, StateGeometry
from ..geometry.batch_geometry import check_shared_batch
from ..lengths import HostLengths
from ..transfer import to_device
from .arguments import check_geometry, check_ragged, check_ragged_verify, check_state, check_uniform
from .checks import check_integers
from .forward import Block, Causal, Chosen, ForwardBatch, Tail, Tree


class BatchBuffers:
    """Static batch tensors of one engine. They are filled before each replay and never move.

    The methods return batches with tensors that are leading slices of these buffers. Two batches of one padded size
    share addresses, so a captured graph reads the contents of the next fill. The object owns its buffers.

    Attributes:
        geometry: shapes and limits that size the buffers; a `StateGeometry` for a model without attention.
        prefix_lens, page_table, positions, mask, depth, q_indptr, slots: see `ForwardBatch` and `Tree`. `q_indptr` is
            None without RAGGED_VERIFY, `slots` is None without Form.ENGINE_SLOTS.
        parents, state_slots: see `Tree` and `ForwardBatch`; None for a model without state layers.
        chosen: see `Chosen`; lists for the largest forward of any mode, also EXTEND. None without chosen_width.

    Args:
        state: geometry of the model's layers with state, which share the batch; None for a model without any.

    Raises:
        GeometryError: `geometry` and `state` differ in the draft shape or the limits.
    """

    def __init__(
        self, geometry: Geometry | StateGeometry, device: torch.device | str, state: StateGeometry | None = None
    ) -> None:
        check_geometry(geometry)
        check_state(state)
        if state is not None:
            check_shared_batch(geometry, state)
        device = present_device("BatchBuffers", device)
        self.geometry = cast("Geometry", geometry)  # typed code reads its attention; a StateGeometry has none
        made = {
            one.name: torch.zeros(one.shape, dtype=getattr(torch, one.dtype), device=device)
            for one in batch_tensors(geometry, state=state is not None)
        }
        self.prefix_lens, self.page_table = made["prefix_lens"], made["page_table"]
        self.positions, self.mask, self.depth = made["positions"], made["mask"], made["depth"]
        self.q_indptr, self.slots = made.get("q_indptr"), made.get("slots")
        self.parents, self.state_slots = made.get("parents"), made.get("state_slots")
        lists = made.get("chosen_slots"), made.get("chosen_counts")
        self.chosen = None if lists[0] is None or lists[1] is None else Chosen(lists[0], lists[1])
        self._indptr: dict[int, torch.Tensor] = {}

    def uniform(
        self,
        mode: Mode,
        step: int,
        padded_reqs: int,
        num_reqs: int,
        host: HostLengths,
        *,
        tree: bool,
        causal: bool = False,
    ) -> ForwardBatch:
        """Return a batch of `padded_reqs` requests with equal row counts, over the static buffers.

        The caller fills the contents of the tensors, except `q_indptr`.

        Args:
            mode: any mode except EXTEND and RAGGED_VERIFY.
            step: index of the DRAFT forward; 0 in other modes.
            padded_reqs: requests including padding, at most max_reqs.
            num_reqs: live requests.
            host: the host's view of the live requests' prefix lengths.
            tree: the tail is a `Tree`; otherwise `Causal`, or `Block` in DRAFT_BLOCK.
            causal: the tail of a DRAFT_BLOCK is `Causal`. Layers of both kinds get two batches over the same tensors.

        Raises:
            BatchError: an argument is out of range.
        """
        check_uniform(self.geometry, mode, step, padded_reqs, num_reqs, host, tree, causal)
        extent: Extent = self.geometry.extent(mode, step)
        rows, slots = padded_reqs * extent.q_len, padded_reqs * extent.tail_len
        tail: Tail = Block() if mode is Mode.DRAFT_BLOCK and not causal else Causal()
        if tree:
            shape = padded_reqs, extent.tail_len
            parents = None if self.parents is None else self.parents[:slots].view(shape)
            tail = Tree(self.mask[:rows], self.depth[:slots].view(shape), parents)
        q_lens, tail_lens = (extent.q_len,) * padded_reqs, (extent.tail_len,) * padded_reqs
        indptr = self._uniform_indptr(extent.q_len)
        return self._batch(mode, step, indptr, tail, host, num_reqs, q_lens, tail_lens, rows)

    def ragged_verify(
        self,
        budget: int,
        num_reqs: int,
        host: HostLengths,
        *,
        tree: bool,
        padded_reqs: int | None = None,
        q_bounds: tuple[int, ...] | None = None,
    ) -> ForwardBatch:
        """Return a RAGGED_VERIFY batch of `budget` rows over the static buffers.

        The caller fills the contents of all tensors, including `q_indptr`.

        Args:
            budget: query rows of the batch, padding included; at most the largest of `Limits.row_budgets`.
            num_reqs: live requests.
            host: the host's view of the live requests' prefix lengths.
            tree: the tail is a `Tree`, otherwise `Causal`.
            padded_reqs: requests that the graph has room for; the default is min(budget, max_reqs).
            q_bounds: upper bound of each request's rows, padded requests included; default num_draft_tokens each.

        Raises:
            BatchError: an argument is out of range, or the geometry does not serve RAGGED_VERIFY.
        """
        geometry = self.geometry
        _, bounds = check_ragged_verify(geometry, budget, num_reqs, host, tree, padded_reqs, q_bounds)
        assert self.q_indptr is not None, "the geometry serves RAGGED_VERIFY"
        parents = None if self.parents is None else self.parents[:budget]
        tail = Tree(self.mask[:budget], self.depth[:budget], parents) if tree else Causal()
        return self._batch(Mode.RAGGED_VERIFY, 0, self.q_indptr, tail, host, num_reqs, bounds, bounds, budget)

    def _batch(
        self,
        mode: Mode,
        step: int,
        indptr: torch.Tensor,
        tail: Tail,
        host: HostLengths,
        num_reqs: int,
        q_lens: tuple[int, ...],
        tail_lens: tuple[int, ...],
        rows: int,
    ) -> ForwardBatch:
        """Return a batch with leading slices of the buffers: `rows` rows, and a request for each entry of `q_lens`."""
        n = len(q_lens)
        slots = None if self.slots is None else self.slots[:rows]
        states = None if self.state_slots is None else self.state_slots[:n]
        lists = None if self.chosen is None else Chosen(self.chosen.slots[:rows], self.chosen.counts[:rows])
        prefix, table, positions = self.prefix_lens[:n], self.page_table[:n], self.positions[:rows]
        numbers = host, num_reqs, q_lens, tail_lens, rows
        return ForwardBatch(mode, step, prefix, indptr[: n + 1], table, tail, positions, *numbers, slots, states, lists)

    def _uniform_indptr(self, q_len: int) -> torch.Tensor:
        if q_len not in self._indptr:
            counts = torch.arange(self.geometry.max_reqs + 1, dtype=torch.int32, device=self.prefix_lens.device)
            self._indptr[q_len] = counts * q_len
        return self._indptr[q_len]


def ragged(
    geometry: Geometry | StateGeometry,
    prefix_lens: torch.Tensor,
    page_table: torch.Tensor,
    q_lens: tuple[int, ...],
    host: HostLengths,
    num_reqs: int | None = None,
    slots: torch.Tensor | None = None,
    state_slots: torch.Tensor | None = None,
    chosen: Chosen | None = None,
) -> ForwardBatch:
    """Return an EXTEND batch: q_lens[r] new tokens of request r follow its prefix, with a causal mask.

    Args:
        geometry: shapes and limits of the batch.
        prefix_lens: int32 ``[R]`` on the device, committed tokens of each request.
        page_table: int32 ``[R, max_pages_per_req]`` on the device, page ids; 0 columns for a `StateGeometry`.
        q_lens: new tokens of each request; 0 for a padded request.
        host: the host's view of the live requests' prefix lengths.
        num_reqs: live requests; default R.
        slots: int64 ``[rows]`` on the device, KV slot of each row, for an engine that places tokens itself.
        state_slots: int32 ``[R]`` on the device, slot of each request's state; required for a `StateGeometry`.
        chosen: lists of keys of each row; required with `AttentionShape.chosen_width`.

    Raises:
        BatchError: a negative entry in `q_lens`, no rows, more rows than `Limits.max_extend_tokens`, or another
            argument that does not match the geometry.
    """
    check_geometry(geometry)
    check_integers("q_lens", q_lens, "give the chunk length of each prompt")
    live = len(q_lens) if num_reqs is None else num_reqs
    check_ragged(geometry, prefix_lens, page_table, q_lens, host, live, slots, state_slots, chosen)
    rows, device = sum(q_lens), prefix_lens.device
    indptr = to_device(list(accumulate(q_lens, initial=0)), device, torch.int32)
    lens = to_device(q_lens, device)
    offset = torch.arange(rows, device=device) - indptr[:-1].long().repeat_interleave(lens, output_size=rows)
    positions = prefix_lens.long().repeat_interleave(lens, output_size=rows) + offset
    return ForwardBatch(
        Mode.EXTEND,
        0,
        prefix_lens,
        indptr,
        page_table,
        Causal(),
        positions.clamp(max=geometry.limits.max_context_len - 1),
        host,
        live,
        q_lens,
        q_lens,
        rows,
        slots,
        state_slots,
        chosen,
    )
