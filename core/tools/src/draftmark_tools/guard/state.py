"""Wrapper of a state backend that checks calls: their order, the batch's contents, and the tensors of each layer."""

from __future__ import annotations

import torch

from draftmark.batch import ForwardBatch, Tree, validate
from draftmark.batch.checks import check_kind, require_tensor, shown
from draftmark.errors import BatchError
from draftmark.geometry import Gate, Mode, Recurrence, StateGeometry
from draftmark.guard import readable
from draftmark.state.backend import StateBackend
from draftmark.state.pool import StateCache, StatePool
from draftmark.tree import VerifyResult

from .call_order import CallOrder
from .contents import check_rows_and_lengths

VERIFIES = (Mode.VERIFY, Mode.RAGGED_VERIFY)


class GuardedState:
    """The `StateBackend` of `LoadedBackend.bind_state` in guard mode. It checks each call, then passes it on."""

    def __init__(self, inner: StateBackend, geometry: StateGeometry) -> None:
        self._inner, self._geometry = inner, geometry
        self._order = CallOrder()

    def plan(self, batch: ForwardBatch) -> None:
        """Check the host numbers and shapes of the batch, then plan."""
        validate(batch, self._geometry)
        self._order.plan(batch)
        self._inner.plan(batch)

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Check that the batch was planned, and its contents where the host may read them; then write."""
        self._order.require_planned(batch)
        if readable(batch.device):
            check_state_contents(batch, self._geometry)
        self._order.write(batch)
        self._inner.write_metadata(batch)

    def convolve(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        cache: StateCache,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        """Check rows, weights and cache, then convolve."""
        s = self._geometry.state
        if not s.conv_kernel:
            raise BatchError("convolve is called, but the layer has no convolution: conv_kernel is 0; remove the call")
        self._check_call("convolve", cache, batch)
        self._check_rows("x", x, (s.conv_channels,), s.dtype, batch)
        self._check_rows("out", out, (s.conv_channels,), s.dtype, batch)
        shapes = [("weight", weight, (s.conv_channels, s.conv_kernel)), ("bias", bias, (s.conv_channels,))]
        for name, tensor, shape in shapes[: 1 if bias is None else 2]:
            check_kind(name, tensor, torch.Tensor, "a tensor", f"pass the layer's {name}")
            assert tensor is not None
            require_tensor(name, tensor, shape, tensor.dtype, batch.device)
        self._inner.convolve(x, weight, bias, cache, batch, out)

    def recur(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor | None,
        cache: StateCache,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        """Check rows, gates and cache, then run the recurrence."""
        s = self._geometry.state
        if s.recurrence is Recurrence.NONE:
            raise BatchError("recur is called, but the layer has no recurrence: Recurrence.NONE; remove the call")
        self._check_call("recur", cache, batch)
        keys, values = (s.num_key_heads, s.key_dim), (s.num_heads, s.value_dim)
        for name, rows, shape in (("q", q, keys), ("k", k, keys), ("v", v, values), ("out", out, values)):
            self._check_rows(name, rows, shape, s.dtype, batch)
        if s.gate is Gate.CONSTANT:
            dtype = getattr(torch, s.compute_dtype)
            require_tensor("log_decay", log_decay, (s.num_heads,), dtype, batch.device)
        else:
            decays = (s.num_heads,) if s.gate is Gate.HEAD else (s.num_heads, s.key_dim)
            self._check_rows("log_decay", log_decay, decays, s.compute_dtype, batch)
        if (beta is None) is (s.recurrence is Recurrence.DELTA):
            limit = "a delta rule has one β per row and head" if beta is None else "a decay has no β"
            raise BatchError(f"beta is {shown(beta)}, but {limit}; see StateBackend.recur")
        if beta is not None:
            self._check_rows("beta", beta, (s.num_heads,), s.compute_dtype, batch)
        self._inner.recur(q, k, v, log_decay, beta, cache, batch, out)

    def commit(
        self,
        pool: StatePool,
        batch: ForwardBatch,
        accepted: VerifyResult | None,
        save_slots: torch.Tensor | None = None,
    ) -> None:
        """Check pool, batch, accepted paths and save slots, then commit."""
        check_kind("pool", pool, StatePool, "a StatePool", "pass the pool of these layers")
        validate(batch, self._geometry)
        if (accepted is None) is (batch.mode in VERIFIES):
            remedy = "pass the result of verify_tree" if accepted is None else "pass None after extend and decode"
            raise BatchError(f"accepted is {shown(accepted)} after {batch.mode.value}; {remedy}")
        if accepted is not None:
            self._check_accepted(batch, accepted)
        if save_slots is not None:
            require_tensor("save_slots", save_slots, (batch.padded_reqs,), torch.int32, batch.device)
            if readable(batch.device):
                check_save_slots(batch, save_slots, pool)
        self._inner.commit(pool, batch, accepted, save_slots)

    def _check_accepted(self, batch: ForwardBatch, accepted: VerifyResult) -> None:
        r, d = batch.padded_reqs, self._geometry.draft.num_draft_tokens
        counts = require_tensor("accept_lens", accepted.accept_lens, (r,), torch.int64, batch.device)
        require_tensor("accept_index", accepted.accept_index, (r, d), torch.int64, batch.device)
        if not readable(batch.device):
            return
        rows = batch.q_indptr.diff()
        # verify_tree counts the root of a request without rows too; the commit clamps that count.
        wrong = ((counts < 0) | (counts > rows.clamp(min=1))).nonzero()
        if len(wrong):
            request = int(wrong[0])
            raise BatchError(
                f"accept_lens[{request}] is {int(counts[request])}, but request {request} has {int(rows[request])} "
                "rows; accept at most the verified rows"
            )

    def _check_call(self, call: str, cache: StateCache, batch: ForwardBatch) -> None:
        self._order.require_written(call, batch)
        check_kind("cache", cache, StateCache, "a StateCache", "take it from StatePool.layers")
        g, s = self._geometry, self._geometry.state
        slots = cache.state.shape[0]
        state = (slots, s.num_heads, s.value_dim, s.key_dim)
        require_tensor("cache.state", cache.state, state, getattr(torch, s.state_dtype), batch.device)
        window = (slots, s.conv_channels, g.window)
        require_tensor("cache.conv", cache.conv, window, getattr(torch, s.conv_dtype), batch.device)
        if not 0 <= cache.layer < g.num_layers:
            raise BatchError(
                f"cache.layer is {cache.layer}, but the geometry has {g.num_layers} layers; take the cache from "
                "StatePool.layers"
            )

    def _check_rows(self, name: str, rows: object, shape: tuple[int, ...], dtype: str, batch: ForwardBatch) -> None:
        want = (batch.num_rows, *shape)
        checked = require_tensor(name, rows, want, getattr(torch, dtype), batch.device)
        contiguous = checked.is_contiguous() if name == "out" else not checked.numel() or checked.stride(-1) == 1
        if not contiguous:
            raise BatchError(f"{name} has strides {list(checked.stride())}, but a row is contiguous; copy the tensor")


def check_state_contents(batch: ForwardBatch, geometry: StateGeometry) -> None:
    """Check the tensors of a batch that `validate` accepts: lengths, rows, slots and parents. Reads the device.

    Raises:
        BatchError: the first tensor that contradicts the batch, with the value, the limit and the remedy.
    """
    rows = check_rows_and_lengths(batch, geometry)
    assert batch.state_slots is not None, "validate requires it"
    owners: dict[int, int] = {}
    slots: list[int] = batch.state_slots.tolist()
    for r, slot in enumerate(slots[: batch.num_reqs]):
        other = owners.setdefault(slot, r)
        if other != r and slot and rows[r]:
            raise BatchError(
                f"requests {other} and {r} both have state slot {slot}, but slots of live requests are distinct; give "
                "each its own"
            )
    wrong = next((r for r, slot in enumerate(slots) if slot < 0), None)
    if wrong is not None:
        raise BatchError(
            f"state_slots[{wrong}] is {slots[wrong]}, but a slot is >= 0; give padding a null slot, such as 0"
        )
    if isinstance(batch.tail, Tree):
        _check_parents(batch, rows)


def _check_parents(batch: ForwardBatch, rows: list[int]) -> None:
    """Require that a row sees exactly its parent's slots and its own."""
    assert isinstance(batch.tail, Tree) and batch.tail.parents is not None
    starts = batch.q_indptr.tolist()
    for r in range(batch.num_reqs):
        n, at = rows[r], slice(starts[r], starts[r] + rows[r])
        words = batch.tail.mask[at].cpu().long()
        seen = ((words[:, :, None] >> torch.arange(32)) & 1).flatten(1).bool()
        own = batch.tail.parents[at] if batch.mode is Mode.RAGGED_VERIFY else batch.tail.parents[r]
        for j, parent in enumerate(own.tolist()[:n]):
            fits = -1 <= parent < j
            want = seen[parent].clone() if fits and parent >= 0 else torch.zeros_like(seen[j])
            want[j] = True
            if not fits or not torch.equal(want, seen[j]):
                visible = seen[j].nonzero()[:, 0].tolist()
                raise BatchError(
                    f"tail.parents of slot {j} of request {r} is {parent}, but its row sees the slots {visible}; write "
                    "mask and parents from one tree with write_tail"
                )


def check_save_slots(batch: ForwardBatch, save_slots: torch.Tensor, pool: StatePool) -> None:
    """Require save slots of the pool that differ from each other and from the batch's slots, except null slots.

    Raises:
        BatchError: the first slot that does not fit.
    """
    assert batch.state_slots is not None, "validate requires it"
    used = {slot: "a request's slot" for slot in batch.state_slots.tolist() if slot >= pool.null_slots}
    for r, slot in enumerate(save_slots.tolist()):
        if not 0 <= slot < pool.num_slots:
            limit = f"slots are 0 … {pool.num_slots - 1}"
            raise BatchError(f"save_slots[{r}] is {slot}, but {limit}; give a request without a checkpoint a null slot")
        if slot >= pool.null_slots and slot in used:
            raise BatchError(
                f"save_slots[{r}] is {slot}, but that is {used[slot]} too; lend each request its own spare slot"
            )
        used[slot] = "another request's save slot"
