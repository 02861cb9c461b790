"""Setups (servers that the judge starts) and scenes (forwards that it runs on their backends).

Imports no torch and no SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftmark import Mode
from draftmark_contract.judge.devices import device_of

CONTEXT, REQUESTS, LARGEST = 96, 4, 3
"""Context length of the tiny model, requests that the server admits, and requests of the captured CUDA graphs."""


@dataclass(frozen=True)
class Heads:
    """Attention heads of the tiny model, and its torch dtype name.

    Attributes:
        value_dim: elements of a value in a stored row of an MLA layer; 0 for layers with K and V.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    value_dim: int = 0

    @property
    def value_width(self) -> int:
        """Elements of a value and of an output row."""
        return self.value_dim or self.head_dim

    @property
    def scale(self) -> float:
        """Factor on q·k. For MLA layers it is that of DeepSeek's heads before absorption (128 + 64 elements)."""
        return float((192 if self.value_dim else self.head_dim) ** -0.5)


ON_A_CPU = Heads(4, 2, 16, "float32")
ON_A_GPU = Heads(8, 2, 128, "bfloat16")
"""A shape that compiled attention kernels support."""
MLA_ON_A_CPU = Heads(4, 1, 288, "float32", 256)
"""Rows of 256 + 32 elements: SGLang's Triton kernels take only this and 512 + 64."""
MLA_ON_A_GPU = Heads(16, 1, 576, "bfloat16", 512)
MLA = {"triton_mla": "triton", "fa3_mla": "fa3", "flashmla": "flashmla"}
"""The judge's targets with MLA layers, with SGLang's name of the attention backend."""


def heads_on(device: str, target: str) -> Heads:
    """Return the attention heads with which a target is judged on a device."""
    if target in MLA:
        return MLA_ON_A_CPU if device_of(device).host else MLA_ON_A_GPU
    return ON_A_CPU if device_of(device).host else ON_A_GPU


@dataclass(frozen=True)
class Setup:
    """Describes one server that the judge starts: page size, and EAGLE's draft shape (all 0 without speculation)."""

    name: str
    page_size: int
    topk: int = 0
    num_steps: int = 0
    num_draft_tokens: int = 0

    @property
    def speculates(self) -> bool:
        """True when the server drafts and verifies."""
        return self.topk > 0


SETUPS = {
    one.name: one
    for one in (
        Setup("page16", 16),
        Setup("page1-tree", 1, 3, 4, 6),
        Setup("page16-chain", 16, 1, 4, 5),
        Setup("page64-tree", 64, 3, 3, 6),
    )
}


@dataclass(frozen=True)
class Scene:
    """Describes one forward, or one round of draft steps, that the judge runs.

    Attributes:
        prefixes: committed tokens of each live request.
        rows: query rows of each request of an EXTEND; empty in other modes, which imply the number.
        tree: kind of draft tree in a VERIFY, see `draftmark_contract.cases.trees.verify_tree`.
        window: tokens to the left of a row that it sees, without the row itself (`sliding_window_size`); -1 for all.
        soft_cap: cap of the logits; 0 for none.
        lengths_on_host: whether the batch has `seq_lens_cpu`.
        mixed: whether an EXTEND uses SGLang's MIXED forward mode.
        seed: seed of the tensors and the page table.
    """

    name: str
    mode: Mode
    prefixes: tuple[int, ...]
    rows: tuple[int, ...] = ()
    tree: str = "random"
    window: int = -1
    soft_cap: float = 0.0
    lengths_on_host: bool = True
    mixed: bool = False
    seed: int = 0


PLAIN = (5, 33, 17)
WINDOW = 6


def eager_scenes(setup: Setup, target: str = "") -> list[Scene]:
    """Return the scenes that run in eager mode: forwards of every mode of a setup, each on a new backend.

    Scenes of MLA layers have no sliding window and no soft cap, because no model has them.
    """
    scenes = [
        Scene("extend", Mode.EXTEND, (0, 16, 7), (9, 4, 1)),
        Scene("mixed", Mode.EXTEND, (30, 0, 12), (1, 11, 1), mixed=True),
        Scene("decode", Mode.DECODE, PLAIN),
        Scene("decode-cap", Mode.DECODE, PLAIN, soft_cap=2.0),
        Scene("extend-cap", Mode.EXTEND, (8, 20), (5, 3), soft_cap=2.0),
        Scene("extend-window", Mode.EXTEND, (0, 16, 3), (9, 4, 8), window=WINDOW),
        Scene("decode-window", Mode.DECODE, (5, 33, WINDOW), window=WINDOW),
    ]
    if setup.speculates:
        kind = "random" if setup.topk > 1 else "chain"
        scenes += [
            Scene(f"verify-{kind}", Mode.VERIFY, PLAIN, tree=kind),
            Scene("verify-window", Mode.VERIFY, PLAIN, tree=kind, window=WINDOW),
            Scene("draft", Mode.DRAFT, (5, 33)),
            Scene("draft-window", Mode.DRAFT, (5, 33), window=WINDOW),
            Scene("draft-extend", Mode.DRAFT_EXTEND, PLAIN),
            Scene("draft-extend-window", Mode.DRAFT_EXTEND, PLAIN, window=WINDOW),
        ]
        if setup.topk > 1:
            scenes.append(Scene("verify-star", Mode.VERIFY, PLAIN, tree="star"))
    return [one for one in scenes if target not in MLA or (one.window < 0 and not one.soft_cap)]


def replayed_modes(setup: Setup) -> list[Mode]:
    """Return the modes that SGLang captures in CUDA graphs."""
    return [Mode.DECODE, *((Mode.VERIFY, Mode.DRAFT, Mode.DRAFT_EXTEND) if setup.speculates else ())]


def replayed(setup: Setup, mode: Mode, window: int = -1) -> list[Scene]:
    """Return scenes to replay with one graph of `LARGEST` requests: batches grow, shrink and change contents."""
    kind = "random" if setup.topk > 1 else "chain"
    batches = ((9,), (20, 1)) if mode is Mode.DRAFT else ((9,), (40, 1, 23), (3,))
    return [
        Scene(f"replay {n}", mode, prefixes, tree=kind, window=window, seed=n) for n, prefixes in enumerate(batches)
    ]


def context_end_scene(setup: Setup, mode: Mode, below: int) -> Scene:
    """Return a scene in which each request's committed length is `below` tokens less than the context length."""
    kind = "random" if setup.topk > 1 else "chain"
    return Scene("wall", mode, (CONTEXT - below,) * LARGEST, tree=kind)
