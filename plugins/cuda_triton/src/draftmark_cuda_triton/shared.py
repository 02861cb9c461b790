"""What sibling plugins take from here. Importing it needs torch and Triton, so import it where a backend is opened.

* `Extend`: EXTEND by our kernel over the caller's buffers: no plan, no host lengths, no sync.
* `FewRows`: every other mode likewise, over the buffers that `shared_sizing.few_rows_buffers` names.
* `write_kv`: rows to their slots, quantised for an e4m3 cache, in one launch.
* `TritonTreeOps`: the loop's tree operations, one launch each; what the hook ``draftmark_tree_ops`` returns.
* `compiled_or_interpreted`: any package of Triton kernels twice, compiled for a GPU and interpreted for CPU tensors.

These names and their arguments change with a major version only.
"""

from .extend import Extend
from .few_rows import FewRows
from .flavours import compiled_or_interpreted
from .tree_ops import TritonTreeOps
from .writing import write_kv

__all__ = ["Extend", "FewRows", "TritonTreeOps", "compiled_or_interpreted", "write_kv"]
