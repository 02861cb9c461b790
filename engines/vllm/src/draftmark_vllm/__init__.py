"""draftmark's attention backends inside an unmodified vLLM, as its backend CUSTOM.

Modules, in the order in which a step passes through them:

* `batch_runs` splits a batch into runs of requests that one mode serves.
* `step` describes each run as a `ForwardBatch` over vLLM's own tensors.
* `bound_backends` holds the backends that serve the runs.
* `pages` views vLLM's KV memory as draftmark's pages.

These four import no vLLM. `backend`, `builder` and `impl` implement vLLM's interfaces. `cpu` lets vLLM's CPU platform
select CUSTOM too.
"""

from .registration import register

__all__ = ["register"]
