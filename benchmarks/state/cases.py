"""Cases of the state benchmark: layers of three models, and batches of one mode."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from draftmark import Gate, Limits, Recurrence, StateGeometry, StateShape

HEADROOM_BYTES = 1 << 32
"""Bytes that the scratch states of one layer may take, so that two layers fit next to everything else."""


@dataclass(frozen=True)
class Layer:
    """Recurrence of one layer of a model, without its short convolution.

    Attributes:
        name: name in the record.
        model: model that has layers of these sizes.
        shape: heads and elements of the layer.
    """

    name: str
    model: str
    shape: StateShape

    @property
    def state_bytes(self) -> int:
        """Bytes of one request's state in this layer."""
        return StateGeometry.create(self.shape, Limits(1, 1)).state_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's inputs and outputs: q, k, v and out in 16 bits, decays and β in float32."""
        s = self.shape
        decays = s.num_heads * (s.key_dim if s.gate is Gate.KEY else 1)
        strengths = s.num_heads if s.recurrence is Recurrence.DELTA else 0
        values = 2 * s.num_key_heads * s.key_dim + 2 * s.num_heads * s.value_dim
        return 2 * values + 4 * (decays + strengths)


def _shape(recurrence: Recurrence, gate: Gate, heads: int, key_heads: int, key_dim: int, value_dim: int) -> StateShape:
    return StateShape(recurrence, gate, heads, key_heads, key_dim, value_dim, 0, 0, "bfloat16", round_prompts=True)


LAYERS = {
    one.name: one
    for one in (
        Layer("gdn", "Qwen3-Next", _shape(Recurrence.DELTA, Gate.HEAD, 32, 16, 128, 128)),
        Layer("kda", "Kimi-Linear", _shape(Recurrence.DELTA, Gate.KEY, 32, 32, 128, 128)),
        Layer("mamba2", "Nemotron-H", _shape(Recurrence.DECAY, Gate.HEAD, 128, 8, 128, 64)),
    )
}


@dataclass(frozen=True)
class Case:
    """One batch.

    Attributes:
        name: name in the record.
        layer: layer that runs.
        mode: decode, chain, tree or extend.
        rows: rows of each request; one entry a request.
        layers: layers of the measured model; their states together are larger than L2.
    """

    name: str
    layer: Layer
    mode: str
    rows: tuple[int, ...]
    layers: int = 2

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.rows)

    @property
    def nodes(self) -> int:
        """Verified rows of a request; 1 for decode, 0 for prompts."""
        return 0 if self.mode == "extend" else self.rows[0]

    @property
    def all_states(self) -> int:
        """Bytes of one layer's states of all requests."""
        return self.requests * self.layer.state_bytes

    @property
    def parents(self) -> list[int]:
        """Parent of each verified row; -1 for the root. Trees are random with a fixed seed."""
        if self.mode != "tree":
            return [*range(-1, self.nodes - 1)]
        chance = random.Random(0)
        return [-1] + [chance.randrange(max(0, node - 8), node) for node in range(1, self.nodes)]

    @property
    def path(self) -> list[int]:
        """Accepted rows: up to three, from the root on."""
        parents, path = self.parents, [0]
        while len(path) < min(3, self.nodes) and path[-1] in parents:
            path.append(parents.index(path[-1]))
        return path

    def bytes_of(self, states_moved: float) -> int:
        """Return the bytes that one layer must move: states, and the rows' inputs and outputs once."""
        return round(states_moved * self.all_states) + sum(self.rows) * self.layer.row_bytes


EXTENDS = {
    "extend-1x512": (512,), "extend-1x8192": (8192,), "extend-8x512": (512,) * 8, "extend-8x2048": (2048,) * 8,
    "extend-8x8192": (8192,) * 8, "extend-uneven": (5, 8192, 700, 1, 2049, 64, 3000, 130),
}  # fmt: skip


def cases(requests: int = 64) -> list[Case]:
    """Return every case of every layer: states in float32, and in bfloat16 where the name says so."""
    found = []
    for layer in LAYERS.values():
        found += [Case(f"decode-{many}", layer, "decode", (1,) * many, 4) for many in (1, requests, 4 * requests)]
        for mode, rows in (("chain", 4), ("chain", 8), ("chain", 16), ("chain", 64), ("tree", 16), ("tree", 64)):
            one = Case(f"{mode}-{requests}x{rows}", layer, mode, (rows,) * requests, 4)
            snapshots = requests * rows * layer.state_bytes
            found.append(replace(one, layers=2) if snapshots >= HEADROOM_BYTES else one)
        found += [Case(name, layer, "extend", rows) for name, rows in EXTENDS.items()]
        short = replace(layer, shape=replace(layer.shape, state_dtype="bfloat16"))
        found += [
            Case(f"decode-{requests}-bfloat16", short, "decode", (1,) * requests, 4),
            Case(f"chain-{requests}x8-bfloat16", short, "chain", (8,) * requests, 4),
        ]
    return found
