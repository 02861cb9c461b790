"""What sibling plugins take from here. Importing it needs torch and Triton, so import it where a backend is opened.

* `Prefill`: EXTEND by our kernel over the caller's buffers: no plan, no host lengths, no sync.
* `DecodeVerify`: every other mode likewise, over the buffers that `shared_sizing.decode_verify_buffers` names.
* `write_kv`: rows to their slots, quantised for an e4m3 cache, in one launch.
* `TritonTreeOps`: the loop's tree operations, one launch each; what the hook ``draftmark_tree_ops`` returns.
* `compiled_or_interpreted`: any package of Triton kernels twice, compiled for a GPU and interpreted for CPU tensors.

These names and their arguments change with a major version only.
"""

from .decode_verify import DecodeVerify
from .kernel_variants import compiled_or_interpreted
from .kv_write import write_kv
from .prefill import Prefill
from .tree_ops import TritonTreeOps

__all__ = ["Prefill", "DecodeVerify", "TritonTreeOps", "compiled_or_interpreted", "write_kv"]
