"""Causal language models from transformers that run on draftmark's attention.

`load_model` reads a folder or a GGUF file. `wrap_model` takes a model already in memory. Both return a `CausalLM` and
reject, before the first token, a model that would run incorrectly. Its `forward` passes every layer's queries, keys
and values to an `AttentionStep`, or to a `StateStep` if the model has recurrent state.
`draftmark_speculative.models.tiny` makes tiny random-weight models offline for tests and examples.
"""

from .attention import AttentionStep, LayerAttention
from .causal_lm import CausalLM
from .loading import load_model, wrap_model
from .states import StateStep

__all__ = ["AttentionStep", "CausalLM", "LayerAttention", "StateStep", "load_model", "wrap_model"]
