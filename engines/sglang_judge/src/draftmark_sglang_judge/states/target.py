"""Items of SGLang's linear-attention backends, as `draftmark judge sglang:gdn` runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from draftmark_contract.judge.states.driver import StateCapabilities, StateDriver
from draftmark_contract.judge.states.layer import Family, Layer, Weights, layer_of
from draftmark_contract.judge.states.questions import questions
from draftmark_contract.runner.item import Item

from ..importing import prepare_imports

LAYERS = {
    "gdn": layer_of("h4", Family.GDN, (4, 2), (32, 32), "float16"),
    "kda": layer_of("h2", Family.KDA, (2, 2), (32, 32), "float32"),
    "mamba2": layer_of("h4", Family.MAMBA2, (4, 2), (32, 16), "float32", conv_bias=True),
}
"""Layers to judge, by target. SGLang's prefill of GDN takes no float32, and the interpreter no bfloat16."""
ROUNDED = {"gdn": 5e-3, "kda": 1e-2, "mamba2": 1e-4}
"""Largest relative error. KDA's prefill rounds to bfloat16 inside, whatever the rows are."""
ATTENTION = "a rule about attention, or about draftmark's own interface"
LEFT_OUT = {
    "state": "a rule about slots, checkpoints, ranks or memory, which one layer does not have",
    "state_graphs": "Triton's interpreter has no graphs",
}


def items(target: str) -> Sequence[Item]:
    """Return the items: chains with the pool of a chain, then trees with the pool of a tree."""
    chains = StateCapabilities(
        open=partial(_open, False),
        layers=[LAYERS[target]],
        ragged=target == "kda",
        decodes=True,
        read_only=True,
        rounded=ROUNDED[target],
    )
    trees = replace(chains, open=partial(_open, True), trees=True)
    return [*questions(chains), *(item for item in questions(trees) if "-tree" in item.case.id)]


def left_out() -> dict[str, str]:
    """Return the rules without an item, each with the reason."""
    from draftmark_contract.judge.rules import rules

    return {**{name.partition(".")[0]: ATTENTION for name in rules()}, **LEFT_OUT}


def _open(tree: bool, layer: Layer, weights: Weights, drafts: int, requests: int) -> StateDriver:
    prepare_imports("cpu")
    from .driver import Snapshots

    return Snapshots(layer, weights, drafts, requests, tree)
