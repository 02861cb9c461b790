"""Speculative decoding of a causal language model, on any backend: the consumer that makes the contract real.

    engine = Engine(load_model(None), EngineConfig(speculate=Ngram(topk=2, num_draft_tokens=8)))
    engine.submit(token_ids, max_new_tokens=64)
    while engine.busy:
        for progress in engine.step():
            ...

One round: drafts, from n-gram look-up on the host or from an EAGLE head on the device → a tree of tokens → one forward
verifies all of them → one target token a row → the walk that keeps the agreeing path → its KV made contiguous → lengths
advance → the head takes over what was accepted.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adaptive import Adaptive, CostTable
    from .config import EngineConfig, HostKind
    from .decoding import Generation, decode, generate
    from .drafts import Drafter, DraftTree, Speculation
    from .eagle import DraftHead, Eagle
    from .engine import Engine
    from .ngram import Ngram
    from .request import FinishReason, Progress
    from .sampling import Sampling
    from .statistics import Statistics

_HOMES = {
    "adaptive": ("Adaptive", "CostTable"),
    "config": ("EngineConfig", "HostKind"),
    "decoding": ("Generation", "decode", "generate"),
    "drafts": ("DraftTree", "Drafter", "Speculation"),
    "eagle": ("DraftHead", "Eagle"),
    "engine": ("Engine",),
    "ngram": ("Ngram",),
    "request": ("FinishReason", "Progress"),
    "sampling": ("Sampling",),
    "statistics": ("Statistics",),
}


def __getattr__(name: str) -> Any:
    # The command line looks at this package where torch cannot be imported: torch is needed by what is used first.
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module 'draftmark_speculative' has no attribute {name!r}")


__all__ = [
    "Adaptive",
    "CostTable",
    "DraftHead",
    "DraftTree",
    "Drafter",
    "Eagle",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "Generation",
    "HostKind",
    "Ngram",
    "Progress",
    "Sampling",
    "Speculation",
    "Statistics",
    "decode",
    "generate",
]
