"""KV memory that a backend keeps outside of vLLM's pages, by sequences instead of slots.

vLLM's runner gives every backend a block table and slots. A backend that ignores them has a model runner of its own,
which informs the memory about requests. The judge has no such runner. A `SequenceMemory` stands in for it: a class of
about 40 lines, written for the backend, that hands the scheduler's output on. `memories` has one for pace-vllm.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

NO_PAGES = (
    "its KV cache is not in vLLM's pages ({shape}); name a class that stands in for its model runner "
    "(draftmark_vllm_judge.sequence_memory)"
)
MEMORIES = {"pace_vllm": "draftmark_vllm_judge.memories.pace:PaceMemory"}
"""Memory classes of this project, by the package of the backend. A backend's attribute `judge_memory` names another."""


@dataclass(frozen=True)
class Schedule:
    """The scheduler's output for one step.

    Attributes:
        new: names of requests that start in this step.
        finished: names of requests that have ended.
        computed: number of tokens that each request of the step has computed, by name, in the order of the batch.
            Rejected drafts are taken off, as in vLLM's `num_computed_tokens`.
        rows: number of rows of each request.
    """

    new: Sequence[str]
    finished: Sequence[str]
    computed: Mapping[str, int]
    rows: Mapping[str, int]


class SequenceMemory(Protocol):
    """Memory of one backend for the layers of one model. A class with this interface may be a target itself.

    Attributes:
        backend: the backend's class.
    """

    backend: Any

    def __init__(self, layers: Sequence[str], spec: Any, config: Any, num_tokens: int) -> None:
        """Allocate memory for layers of vLLM's `spec`, in vLLM's `config`, with room for `num_tokens` tokens."""

    def update(self, schedule: Schedule) -> None:
        """Do what the backend's model runner does before it builds metadata."""


def is_memory(found: Any) -> bool:
    """Return True for a class with the interface of `SequenceMemory`."""
    return hasattr(found, "update") and hasattr(found, "backend")


def memory_of(found: Any) -> Any:
    """Return the class for a target: the target itself, or the class that stands in for its runner; None if neither."""
    if is_memory(found):
        return found
    named = getattr(found, "judge_memory", None) or MEMORIES.get(found.__module__.partition(".")[0])
    if named is None:
        return None
    module, _, name = named.partition(":")
    return getattr(importlib.import_module(module), name)
