"""Public names for sibling plugins. Importing this module loads torch and Triton, so import it in `open_backend`.

* `Prefill`: EXTEND over the caller's buffers, without a host plan, host lengths or synchronization.
* `DecodeVerify`: every other mode, over the buffers of `shared_sizing.decode_verify_buffers`.
* `write_kv`: scatter K and V rows to their slots in one launch, quantized if the cache is e4m3.
* `TritonTreeOps`: tree operations of the decoding loop, one launch each; for the plugin hook ``draftmark_tree_ops``.
* `prepare`: compile and load every kernel that the classes above launch for a geometry; nothing on a CPU.
* `compiled_or_interpreted`: a package of Triton kernels, compiled for GPU tensors or interpreted for CPU tensors.

These names and their arguments change only with a major version.
"""

from .compiled.prepare import prepare
from .decode_verify import DecodeVerify
from .kernel_variants import compiled_or_interpreted
from .kv_write import write_kv
from .prefill import Prefill
from .tree_ops import TritonTreeOps

__all__ = ["Prefill", "DecodeVerify", "TritonTreeOps", "compiled_or_interpreted", "prepare", "write_kv"]
