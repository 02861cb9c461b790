"""Public API with tensors: batches, lengths, KV cache, graphs and the methods of a backend.

* Forward: `ForwardBatch` with a `Causal`, `Tree` or `Block` tail; `BatchBuffers` and `ragged` create one.
  `Chosen` holds the keys of each row in a layer with an indexer.
* Lengths: `SequenceLengths` owns them; the host's view is `Exact`, `UpperBound` or `Unknown`.
* Memory: a `KVPool` of one `KVCache` per layer, and the backend's `Arena`.
* Attention: `AttentionBackend`, the four methods of a plugin; `BoundBackend` adds their optional arguments.
* Draft trees: `write_tail`, `verify_tree`, and `TreeOps`, which a backend may implement with its own kernels.
* Recurrent state: a `StatePool` of one `StateCache` per layer, and `StateBackend`, the five methods.
* End of a round: `commit_round` compacts accepted KV and advances the lengths.
* Graphs: a `GraphState` with one graph per `GraphKey`, and `record_call` for kernels that torch does not dispatch.
* Host and device: `to_device`, `AsyncHostCopy`, `fence`, `device_profile`.

This module imports torch. The module `draftmark` does not.
"""

from . import batch, graphs, state
from .arena import Arena
from .backend import AttentionBackend, BoundBackend
from .batch import *
from .cache import KVCache, KVPool, sinks_of, slots_of
from .commit import commit_round
from .devices import device_profile
from .graphs import *
from .lengths import Exact, HostLengths, SequenceLengths, Unknown, UpperBound
from .state import *
from .transfer import AsyncHostCopy, Fence, fence, to_device
from .tree import TorchTreeOps, TreeOps, VerifyResult, ancestors, depths, verify_tree, write_tail

__all__ = [
    *batch.__all__,
    *graphs.__all__,
    *state.__all__,
    "Arena",
    "AsyncHostCopy",
    "AttentionBackend",
    "BoundBackend",
    "Exact",
    "Fence",
    "HostLengths",
    "KVCache",
    "KVPool",
    "SequenceLengths",
    "TorchTreeOps",
    "TreeOps",
    "Unknown",
    "UpperBound",
    "VerifyResult",
    "ancestors",
    "commit_round",
    "depths",
    "device_profile",
    "fence",
    "sinks_of",
    "slots_of",
    "to_device",
    "verify_tree",
    "write_tail",
]
