"""Do all tensor-parallel ranks run the same step? A digest of its metadata, and a guard that compares them.

Each rank schedules for itself, and a step in which one drafts and another does not (vllm#49027), or in which they bring
9 and 10 rows (sglang#33289), hangs in the next collective or, worse, ends. The digest is a few launches on the device
and no host read; the guard's own collective has a fixed size, so it cannot hang for what it looks for, and it is read a
step late, so nothing waits. Cheap enough to stay on.
"""

from __future__ import annotations

from collections import deque
from hashlib import sha256

import torch
import torch.distributed as dist

from .batch import ForwardBatch, Tree
from .errors import RanksDisagree
from .transfer import AsyncHostCopy

PARTS = ("mode, step and row counts", "prefix lengths", "query rows", "pages", "tail", "positions", "slots")
"""What each entry of a digest speaks of."""
_FIRST, _SECOND = -7046029254386353131, -4658895280553007687
"""Odd 64-bit multipliers of a mixing function (splitmix64's), as signed integers."""


def step_digest(batch: ForwardBatch, page_size: int) -> torch.Tensor:
    """A digest of everything that ranks must agree on in one forward. Capturable, no host read.

    Pages behind a request's last token and rows behind the last request's are left out: they may be stale. A digest
    says that two steps differ, never how: equal digests of different steps are one in 2**64.

    Args:
        batch: filled, with its device tensors.
        page_size: tokens of a page.

    Returns:
        int64 ``[len(PARTS)]`` on the batch's device.
    """
    device = batch.device
    head = _number(device, batch.mode.value, batch.step, batch.padded_reqs, batch.num_rows)
    live = torch.arange(batch.num_rows, device=device) < batch.q_indptr[-1]
    column = torch.arange(batch.page_table.shape[1], device=device)
    tail = batch.q_indptr.diff() if batch.uniform is None else batch.uniform.tail_len
    used = column < ((batch.prefix_lens + tail + page_size - 1) // page_size)[:, None]
    parts = [
        head,
        _mix(batch.prefix_lens),
        _mix(batch.q_indptr),
        _mix(torch.where(used, batch.page_table, -1)),
        _tail(batch, live),
        _mix(torch.where(live, batch.positions, -1)),
        _mix(torch.where(live, batch.slots, -1)) if batch.slots is not None else torch.zeros_like(head),
    ]
    return torch.stack(parts)


def _number(device: torch.device, *host: object) -> torch.Tensor:
    """An int64 scalar for what the host knows, the same in every process. A fill: a graph may hold it."""
    word = int.from_bytes(sha256(repr(host).encode()).digest()[:8], "big", signed=True)
    return torch.full((), word, dtype=torch.int64, device=device)


class RankGuard:
    """Compares the digests of a process group's ranks, a step late.

        guard = RankGuard(group)
        ...
        guard.observe(step_digest(batch, page_size))   # after the batch is filled, before or behind the forward

    Every rank must observe every step. With one rank, or without `torch.distributed`, it does nothing.

    Args:
        group: the tensor-parallel group; None for the default one.
        lag: steps that may be under way before the oldest is read. 0 waits for each: for tests and for debugging.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, lag: int = 1) -> None:
        self._group, self._lag = group, lag
        self._ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        self._sent: deque[tuple[int, AsyncHostCopy]] = deque()
        self._steps = 0

    def observe(self, digest: torch.Tensor) -> None:
        """Send this step's digest round, and look at the oldest that is due.

        Args:
            digest: int64 ``[len(PARTS)]``, of `step_digest`.

        Raises:
            RanksDisagree: on every rank alike, up to `lag` steps late.
        """
        if self._ranks == 1:
            return
        gathered = digest.new_empty(self._ranks * len(digest))
        dist.all_gather_into_tensor(gathered, digest, group=self._group)
        self._sent.append((self._steps, AsyncHostCopy([gathered.view(self._ranks, -1)])))
        self._steps += 1
        while len(self._sent) > self._lag:
            self._compare(*self._sent.popleft())

    def finish(self) -> None:
        """Look at every step that is still under way; waits for them."""
        while self._sent:
            self._compare(*self._sent.popleft())

    def _compare(self, step: int, copy: AsyncHostCopy) -> None:
        (rows,) = copy.wait()
        for part, said in zip(PARTS, zip(*rows, strict=True), strict=True):
            others = [rank for rank, value in enumerate(said) if value != said[0]]
            if others:
                raise RanksDisagree(part, others, step)


def _tail(batch: ForwardBatch, live: torch.Tensor) -> torch.Tensor:
    if not isinstance(batch.tail, Tree):
        return _number(batch.device, type(batch.tail).__name__)
    depth = batch.tail.depth
    if depth.dim() == 1:  # by row
        depth = torch.where(live, depth, -1)
    return _mix(torch.where(live[:, None], batch.tail.mask, 0)) + _mix(depth) * 3


def _mix(values: torch.Tensor) -> torch.Tensor:
    """int64 scalar: a sum over (place, value), so that it does not depend on the order in which a device adds."""
    x = values.reshape(-1).long()
    x = (x + torch.arange(1, len(x) + 1, device=x.device) * _FIRST) * _SECOND
    x = (x ^ (x >> 29)) * _FIRST
    return (x ^ (x >> 32)).sum()
