"""Check that all tensor-parallel ranks run the same step: a digest of its metadata, and a guard that compares digests.

Each rank schedules its own steps. Two ranks may disagree on whether to draft (vllm#49027), or on the number of rows
(9 and 10 in sglang#33289). The next collective then hangs or, worse, returns a wrong result. The digest takes a few
kernel launches and no host read. The guard's all-gather has a fixed size, so ranks that disagree do not make it hang.
The guard reads the result one step later, so no step waits for the result. Both are cheap enough for production.
"""

from __future__ import annotations

from collections import deque
from hashlib import sha256

import torch
import torch.distributed as dist

from draftmark.runtime import AsyncHostCopy, ForwardBatch, Tree

from .errors import RanksDisagree

PARTS = ("mode, step and row counts", "prefix lengths", "query rows", "pages", "tail", "positions", "slots")
"""Name of each entry of a digest, in order."""
_FIRST, _SECOND = -7046029254386353131, -4658895280553007687
"""Odd 64-bit multipliers of splitmix64's mixing function, as signed integers."""


def step_digest(batch: ForwardBatch, page_size: int) -> torch.Tensor:
    """Return a digest of all metadata that ranks must agree on in one forward. Capturable, no host read.

    State slots are not included, because each rank gives out its own. Pages after a request's last token and rows after
    the last request's rows may be stale, so they are not included either. Two different steps have equal digests with a
    probability of 2**-64.

    Args:
        batch: a batch with all its device tensors filled. Read-only.
        page_size: tokens of a page.

    Returns:
        int64 ``[len(PARTS)]`` on the batch's device.
    """
    device = batch.device
    head = _number(device, batch.mode.value, batch.step, batch.padded_reqs, batch.num_rows)
    live = torch.arange(batch.num_rows, device=device) < batch.q_indptr[-1]
    column = torch.arange(batch.page_table.shape[1], device=device)
    tail = batch.tail_lens[0] if batch.uniform else batch.q_indptr.diff()
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
    """Return an int64 scalar hash of host values, equal in every process. A fill kernel writes it: capturable."""
    word = int.from_bytes(sha256(repr(host).encode()).digest()[:8], "big", signed=True)
    return torch.full((), word, dtype=torch.int64, device=device)


class RankGuard:
    """Compares the digests of each step between the ranks of a process group, one step later.

        guard = RankGuard(group)
        ...
        guard.observe(step_digest(batch, page_size))   # after the batch is filled, before or after the forward

    Every rank must observe every step. With one rank, or without `torch.distributed`, the guard does nothing.

    Args:
        group: the tensor-parallel group; None for the default group.
        lag: number of steps in flight before the oldest is compared. 0 waits for each step, for tests and debugging.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, lag: int = 1) -> None:
        self._group, self._lag = group, lag
        self._ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        self._sent: deque[tuple[int, AsyncHostCopy]] = deque()
        self._steps = 0

    def observe(self, digest: torch.Tensor) -> None:
        """Start the all-gather of this step's digest, and compare the digests of the step `lag` steps earlier.

        Args:
            digest: int64 ``[len(PARTS)]`` from `step_digest`.

        Raises:
            RanksDisagree: on every rank, up to `lag` steps after the step with different digests.
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
        """Wait for all steps in flight and compare their digests; raises `RanksDisagree` as `observe` does."""
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
    if depth.dim() == 1:  # RAGGED_VERIFY has one depth per row; depths of padding rows may be stale
        depth = torch.where(live, depth, -1)
    found = _mix(torch.where(live[:, None], batch.tail.mask, 0)) + _mix(depth) * 3
    parents = batch.tail.parents
    if parents is None:
        return found
    return found + _mix(torch.where(live, parents, -1) if parents.dim() == 1 else parents) * 5


def _mix(values: torch.Tensor) -> torch.Tensor:
    """Return an int64 scalar hash of (index, value) pairs: a sum, so the order of additions does not matter."""
    x = values.reshape(-1).long()
    x = (x + torch.arange(1, len(x) + 1, device=x.device) * _FIRST) * _SECOND
    x = (x ^ (x >> 29)) * _FIRST
    return (x ^ (x >> 32)).sum()
