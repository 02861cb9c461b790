"""Speculative decoding of a causal language model on any draftmark backend.

    engine = Engine(load_model(None), EngineConfig(speculate=Ngram(topk=2, num_draft_tokens=8)))
    engine.submit(token_ids, max_new_tokens=64)
    while engine.busy:
        for progress in engine.step():
            ...

One round:

1. Draft: an n-gram look-up on the host or an EAGLE head on the device proposes a tree of tokens.
2. Verify: one forward of the target model computes the next token after every row of the tree.
3. Accept: the engine keeps the path on which the drafts agree with the target's tokens.
4. Commit: the accepted KV is made contiguous, recurrent states follow the accepted path, and the lengths advance.
5. Draft extend: the EAGLE head processes the accepted tokens.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adaptive import Adaptive, CostTable
    from .config import EngineConfig, HostKind
    from .decoding import Generation, decode, generate
    from .dflash import BlockConfig, BlockHead, DFlash
    from .drafts import Drafter, DraftTree, Speculation
    from .eagle import DraftHead, Eagle
    from .engine import Engine
    from .mtp import Mtp, MtpHead, MtpModules
    from .ngram import Ngram
    from .request import FinishReason, Progress
    from .sampling import Sampling
    from .statistics import Statistics

_HOMES = {
    "adaptive": ("Adaptive", "CostTable"),
    "config": ("EngineConfig", "HostKind"),
    "decoding": ("Generation", "decode", "generate"),
    "dflash": ("BlockConfig", "BlockHead", "DFlash"),
    "drafts": ("DraftTree", "Drafter", "Speculation"),
    "eagle": ("DraftHead", "Eagle"),
    "engine": ("Engine",),
    "mtp": ("Mtp", "MtpHead", "MtpModules"),
    "ngram": ("Ngram",),
    "request": ("FinishReason", "Progress"),
    "sampling": ("Sampling",),
    "statistics": ("Statistics",),
}


def __getattr__(name: str) -> Any:
    # Import on first use: the command line inspects this package where torch is not installed.
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module 'draftmark_speculative' has no attribute {name!r}")


__all__ = [
    "Adaptive",
    "BlockConfig",
    "BlockHead",
    "CostTable",
    "DFlash",
    "DraftHead",
    "DraftTree",
    "Drafter",
    "Eagle",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "Generation",
    "HostKind",
    "Mtp",
    "MtpHead",
    "MtpModules",
    "Ngram",
    "Progress",
    "Sampling",
    "Speculation",
    "Statistics",
    "decode",
    "generate",
]
