"""Attention backend `draftmark` for SGLang, loaded by SGLang's own plugin mechanism (`sglang.srt.plugins`).

* Start-up: `plugin` registers the backend and its name, `hooks` lists what `hook_functions` patches in SGLang,
  `refusals` rejects unsupported runs.
* Each forward: `phases` maps SGLang's forward mode to a draftmark mode. `batches` builds a `ForwardBatch`
  with the help of `page_table`, `window_pool` and `trees`. `attention` runs the batch on each layer's backend.
* Recurrent layers of hybrid models: `state_shapes` says whether draftmark runs them, `state_memory` sizes SGLang's
  slots, `state_layers` runs a batch with the help of `extend_pieces` and `state_inputs`.
* `backend`, `linear` and `draft_steps` contain the classes that SGLang calls.

Importing this module imports neither SGLang nor torch.
"""

from .facts import NAME


def register() -> None:
    """Register the backend, its name and its hooks with SGLang. The entry point runs once in each SGLang process."""
    from .plugin import register_all

    register_all()


__all__ = ["NAME", "register"]
