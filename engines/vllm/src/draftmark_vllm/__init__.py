"""draftmark's attention backends inside an unmodified vLLM, as its backend CUSTOM.

One way through the package, as a step goes: `spans` cuts a batch into runs of one mode, `step` gives each run as a
`ForwardBatch` over vLLM's own tensors, `served` holds the backends that run it, `pages` views vLLM's KV memory. Those
import no vLLM. `backend`, `builder` and `impl` are what vLLM asks for; `cpu` lets its CPU platform ask for it too.
"""

from .registration import register

__all__ = ["register"]
