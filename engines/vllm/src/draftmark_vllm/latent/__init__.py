"""Layers with latent attention (MLA): vLLM stores their rows and runs prompts; draftmark runs decodes and verifies.

* `backend` has the class that vLLM's selector reads. `DraftmarkBackend`, which is vLLM's CUSTOM, passes it on.
* `impl` runs the absorbed attention of one layer (vLLM's `forward_mqa`).
* `builder` builds the batches of a step's decodes and verifies.

Prompts run in vLLM's own prefill backends, which attend before absorption.
"""
