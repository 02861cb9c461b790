"""Causal language models from transformers that run on draftmark's attention.

`load_model` reads a folder or a GGUF file. `wrap_model` takes a model already in memory. Both return a `CausalLM` and
reject, before the first token, a model that would run incorrectly. Its `forward` passes every layer's queries, keys
and values to an `AttentionStep`. `draftmark_speculative.models.tiny` makes tiny random-weight models offline for tests
and examples.
"""

from .attention import AttentionStep, LayerAttention
from .causal_lm import CausalLM
from .loading import load_model, wrap_model

__all__ = ["AttentionStep", "CausalLM", "LayerAttention", "load_model", "wrap_model"]
