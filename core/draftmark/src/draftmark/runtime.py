"""The tensor half of the public API: what an engine hands to a backend on every step, and what both keep meanwhile.

* a forward: `ForwardBatch` with its `Causal`, `Tree` or `Block` tail, made by `BatchBuffers` or `ragged`;
* lengths: `SequenceLengths` owns them; the host's view is `Exact`, `UpperBound` or `Unknown`;
* memory: the `KVPool` of `KVCache` layers, and the backend's `Arena`;
* the step path: `AttentionBackend`;
* draft trees: `write_tail`, `verify_tree`, and the `TreeOps` that a backend may replace;
* graphs: a `GraphState` by `GraphKey`, and `record_call` for kernels that torch does not see;
* ranks: `step_digest` and the `RankGuard` that compares it;
* host and device: `to_device`, `AsyncHostCopy`, `fence`, `device_profile`.

It imports torch. `draftmark` itself has what needs integers only.
"""

from .arena import Arena
from .backend import AttentionBackend
from .batch import BatchBuffers, Block, Causal, ForwardBatch, Tail, Tree, ragged, validate
from .cache import KVCache, KVPool, sinks_of, slots_of
from .devices import device_profile
from .graphs import (
    GraphKey,
    GraphState,
    KeyedGraphState,
    Program,
    Recording,
    graph_state_for,
    is_recording,
    mark_host,
    mark_pinned,
    padded_batch_size,
    record_call,
)
from .lengths import Exact, HostLengths, SequenceLengths, Unknown, UpperBound
from .ranks import RankGuard, step_digest
from .transfer import AsyncHostCopy, Fence, fence, to_device
from .tree import TorchTreeOps, TreeOps, VerifyResult, ancestors, depths, verify_tree, write_tail

__all__ = [
    "Arena",
    "AsyncHostCopy",
    "AttentionBackend",
    "BatchBuffers",
    "Block",
    "Causal",
    "Exact",
    "Fence",
    "ForwardBatch",
    "GraphKey",
    "GraphState",
    "HostLengths",
    "KVCache",
    "KVPool",
    "KeyedGraphState",
    "Program",
    "RankGuard",
    "Recording",
    "SequenceLengths",
    "Tail",
    "TorchTreeOps",
    "Tree",
    "TreeOps",
    "Unknown",
    "UpperBound",
    "VerifyResult",
    "ancestors",
    "depths",
    "device_profile",
    "fence",
    "graph_state_for",
    "is_recording",
    "mark_host",
    "mark_pinned",
    "padded_batch_size",
    "ragged",
    "record_call",
    "sinks_of",
    "slots_of",
    "step_digest",
    "to_device",
    "validate",
    "verify_tree",
    "write_tail",
]
