"""Ways in which engines take rejected rows out of a recurrent state, with the bytes that each holds and moves.

A speculative round verifies D rows of each of R requests and accepts some of them. Sources of the formulas: SGLang
0.5.23, vLLM 0.32, FlashInfer 0.7.4 and TensorRT-LLM. S is the bytes of all live states, ``R · num_layers ·
state_bytes``: plain decoding reads and writes them once, 2 S a round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from draftmark.geometry import DTYPE_BYTES, StateGeometry

RING = 16
"""Rows after which a ring folds its records into the slot, in SGLang, vLLM and TensorRT-LLM."""


@dataclass(frozen=True)
class Scheme:
    """One way to take rows back.

    Attributes:
        name: name in ``draftmark size --state MODEL --scheme``.
        users: engines that work this way, or the difference to another scheme.
        trees: it verifies trees.
        held: returns the bytes on this rank, without the committed slots, for max_num_reqs requests.
        moved: returns the bytes of states and records that one round reads and writes, given the accepted rows of a
            request.
        held_formula, moved_formula: the two formulas, for readers.
    """

    name: str
    users: str
    trees: bool
    held: Callable[[StateGeometry], int]
    moved: Callable[[StateGeometry, int], int]
    held_formula: str
    moved_formula: str


def committed_bytes(g: StateGeometry) -> int:
    """Return the bytes of one slot per request, in every layer."""
    return g.limits.max_num_reqs * g.num_layers * g.slot_bytes


def state_traffic(g: StateGeometry) -> int:
    """Return S: the bytes of the states of all requests, in every layer, read once."""
    return g.limits.max_num_reqs * g.num_layers * g.state_bytes


def _rows(g: StateGeometry) -> int:
    """Return the rows of a verify with one padded request, in every layer."""
    return g.num_layers * (g.limits.max_num_reqs + 1) * g.draft.num_draft_tokens


def _records(g: StateGeometry, rows: int) -> int:
    return g.limits.max_num_reqs * g.num_layers * rows * g.record_bytes


def _slots_held(g: StateGeometry) -> int:
    """Return the bytes of D − 1 more slots per request; each slot has a window of K − 1 + D − 1 columns."""
    more = g.draft.num_draft_tokens - 1
    wider = g.state.conv_channels * more * DTYPE_BYTES[g.state.conv_dtype]
    return g.limits.max_num_reqs * g.num_layers * (more * (g.slot_bytes + wider) + wider)


def _folded(g: StateGeometry, passes: int) -> int:
    """Return the traffic of replay: some passes over all states, and D records written and read."""
    return passes * state_traffic(g) + _records(g, 2 * g.draft.num_draft_tokens)


def _nodes(g: StateGeometry) -> int:
    return g.draft.num_draft_tokens


SCHEMES = (
    Scheme(
        "snapshots", "SGLang, TensorRT-LLM (legacy), llama.cpp", False,
        lambda g: _rows(g) * g.slot_bytes,
        lambda g, _: (_nodes(g) + 3) * state_traffic(g),
        "num_layers · (R+1) · D · slot_bytes", "(D+3) · S",
    ),
    Scheme(
        "snapshots-tree", "SGLang", True,
        lambda g: _rows(g) * g.slot_bytes,
        lambda g, _: (2 * _nodes(g) + 2) * state_traffic(g),
        "num_layers · (R+1) · D · slot_bytes", "(2D+2) · S",
    ),
    Scheme(
        "slots", "vLLM, vllm-ascend, FLA", False,
        _slots_held,
        lambda g, _: (_nodes(g) + 1) * state_traffic(g),
        "num_layers · R · (D−1) slots, windows K−1+D−1 wide", "(D+1) · S",
    ),
    Scheme(
        "replay-windows", "replay, with a whole window per row", False,
        lambda g: _rows(g) * (g.record_bytes + g.conv_bytes),
        lambda g, _: _folded(g, 3),
        "num_layers · (R+1) · D · (record_bytes + conv_bytes)", "3 S + 2D records",
    ),
    Scheme(
        "replay", "draftmark (trees); SGLang, FlashInfer, vLLM RecoverSSM (chains)", True,
        lambda g: _rows(g) * (g.record_bytes + g.channel_bytes),
        lambda g, _: _folded(g, 3),
        "num_layers · (R+1) · D · (record_bytes + channel_bytes)", "3 S + 2D records",
    ),
    Scheme(
        "replay-late", "replay, folded by the next verify", False,
        lambda g: _rows(g) * (g.record_bytes + g.channel_bytes),
        lambda g, _: _folded(g, 2),
        "num_layers · (R+1) · D · (record_bytes + channel_bytes)", "2 S + 2D records",
    ),
    Scheme(
        "ring", "SGLang (GDN), FlashInfer, TensorRT-LLM, vLLM (Mamba2)", False,
        lambda g: _rows(g) * g.channel_bytes + (_rows(g) + _rows(g) // _nodes(g) * RING) * g.record_bytes,
        lambda g, accepted: state_traffic(g) + 2 * accepted * state_traffic(g) // RING
        + _records(g, _nodes(g) + RING // 2),
        "num_layers · (R+1) · ((D+16) · record_bytes + D · channel_bytes)", "(1 + 2·accepted/16) · S + D+8 records",
    ),
)  # fmt: skip
"""Every scheme, in the order of the bytes that it moves for long drafts."""
