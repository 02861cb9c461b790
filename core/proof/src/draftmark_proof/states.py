"""Theorems about recurrent layers, for any heads, elements, kernels, layers, requests and rows.

Each theorem runs the core's formulas, and the reference's buffers, on symbols.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftmark.geometry import DeviceProfile, DraftShape, Gate, Limits, Recurrence, StateGeometry, StateShape
from draftmark_reference.sizing import replay_buffers, snapshot_buffers

from .latent import decide
from .prover import Status
from .solver import Answer
from .symbols import Context

ACTIVATION, COMPUTE = 2, 4
"""Bytes of a bfloat16 and of a float32 number."""


class Round:
    """Symbols of one verify and its commit, within the limits of a geometry.

    Attributes:
        keys, heads_per_key, key_dim, value_dim: heads and elements of a layer.
        channels, kernel: its convolution.
        layers, layer: layers of the model, and one of them.
        max_num_reqs, captured: live requests of the largest batch, and a captured batch size.
        nodes: rows of a request in the largest verify, D.
        requests, request: padded requests of this batch, and one of them.
        rows, row, count: rows of that request, one of them, and its accepted rows.
        column: a column of the window.
    """

    def __init__(self) -> None:
        self.context = Context()
        free: Callable[[str, int], Any] = self.context.variable
        self.keys, self.heads_per_key = free("keys", 1), free("heads_per_key", 1)
        self.key_dim, self.value_dim = free("key_dim", 1), free("value_dim", 1)
        self.channels, self.kernel = free("channels", 1), free("K", 2)
        self.layers, self.layer = free("layers", 1), free("layer", 0)
        self.max_num_reqs, self.captured, self.nodes = free("max_num_reqs", 1), free("captured", 1), free("D", 1)
        self.requests, self.request = free("R", 1), free("r", 0)
        self.rows, self.row, self.count = free("q", 1), free("t", 0), free("count", 0)
        self.column = free("column", 0)
        for low, high in ((self.layer, self.layers), (self.request, self.requests), (self.row, self.rows)):
            self.context.assume(low <= high - 1)
        self.context.assume((self.requests <= self.max_num_reqs) | (self.requests <= self.captured))
        self.context.assume(self.rows <= self.nodes)
        self.context.assume(self.count <= self.rows)
        self.context.assume(self.column <= self.kernel - 2)

    def geometry(self, recurrence: Recurrence = Recurrence.DELTA, gate: Gate = Gate.HEAD) -> StateGeometry:
        """Return a geometry of these symbols."""
        shape = StateShape(
            recurrence, gate, self.keys * self.heads_per_key, self.keys, self.key_dim, self.value_dim, self.channels,
            self.kernel, "bfloat16",
        )  # fmt: skip
        limits = Limits(self.max_num_reqs, 1, 1, (self.captured,))
        return StateGeometry(
            shape, DraftShape(num_draft_tokens=self.nodes), limits, DeviceProfile(), num_layers=self.layers
        )

    @property
    def entry(self) -> Any:
        """Index of a row in a buffer by layer, batch entry and tail slot."""
        return (self.layer * self.geometry().max_reqs + self.request) * self.nodes + self.row


Statement = Callable[[Round], Any]
"""Goal about a round: a condition on symbols."""


def _slot_bytes(r: Round) -> Any:
    state = r.keys * r.heads_per_key * r.value_dim * r.key_dim * COMPUTE
    return r.geometry().slot_bytes == state + r.channels * (r.kernel - 1) * ACTIVATION


def _replay(recurrence: Recurrence, gate: Gate) -> Statement:
    """Return the statement that the reference's records have the core's bytes for each row."""

    def holds(r: Round) -> Any:
        g = r.geometry(recurrence, gate)
        total = sum(spec.nbytes for spec in replay_buffers(g))
        constant = g.num_layers * g.state.num_heads * COMPUTE * int(gate is Gate.CONSTANT)
        return total == g.num_layers * g.max_reqs * r.nodes * (g.record_bytes + g.channel_bytes) + constant

    return holds


def _snapshots(r: Round) -> Any:
    g = r.geometry()
    return sum(spec.nbytes for spec in snapshot_buffers(g)) == g.num_layers * g.max_reqs * r.nodes * g.slot_bytes


def _entries(r: Round) -> Any:
    """State that each row of each layer has its own entry: the last one is inside the buffer."""
    return r.entry <= r.layers * r.geometry().max_reqs * r.nodes - 1


def _null_slots(r: Round) -> Any:
    """State that each padded request of a batch can have its own null slot."""
    return r.requests <= r.geometry().null_slots(unique=True)


def _window(r: Round) -> Any:
    """State that a commit's column lies in the window and the tail: from the first column to the last row."""
    g = r.geometry()
    return r.count + r.column <= g.window + r.rows - 1


def _ancestors(r: Round) -> Any:
    """State that the ancestors of a root that its convolution reads are columns of the window."""
    return r.geometry().window - 1 - r.column >= 0


def _without_captures(r: Round) -> Any:
    """State that buffers of the live requests are enough (sglang#25124)."""
    return (r.layer * r.max_num_reqs + r.request) * r.nodes + r.row <= r.layers * r.max_num_reqs * r.nodes - 1


def _one_row_less(r: Round) -> Any:
    """State that the drafts need entries and the root needs none (vllm#39809)."""
    return r.row <= r.nodes - 2


def _column_before_the_first(r: Round) -> Any:
    """State that column count - 1 exists for every count (vllm#56419)."""
    return r.count - 1 >= 0


THEOREMS: dict[str, Statement] = {
    "a slot's bytes are its state and its window": _slot_bytes,
    "records of a delta rule with a decay per head": _replay(Recurrence.DELTA, Gate.HEAD),
    "records of a delta rule with a decay per key": _replay(Recurrence.DELTA, Gate.KEY),
    "records of a decay per head": _replay(Recurrence.DECAY, Gate.HEAD),
    "records of a constant decay": _replay(Recurrence.DECAY, Gate.CONSTANT),
    "snapshots are a slot for each row": _snapshots,
    "each row of each layer has an entry": _entries,
    "each padded request can have a null slot": _null_slots,
    "a commit's columns lie in the window and the tail": _window,
    "ancestors of a root lie in the window": _ancestors,
}
"""Statements that hold for every round."""
FALSE: dict[str, Statement] = {
    "buffers of live requests are enough": _without_captures,
    "the root needs no entry": _one_row_less,
    "a column before the first accepted row exists": _column_before_the_first,
}
"""Statements that some round violates; engines relied on each."""


def decide_round(statement: Statement) -> tuple[Status, Answer]:
    """Prove a statement about every round, or find a round that violates it; see `latent.decide`."""
    return decide(statement, Round())
