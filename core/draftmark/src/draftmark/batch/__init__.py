"""ForwardBatch: inputs of one forward's attention, in one form for all modes."""

from .buffers import BatchBuffers, ragged
from .checks import validate
from .forward import Block, Causal, Chosen, ForwardBatch, Tail, Tree

__all__ = ["BatchBuffers", "Block", "Causal", "Chosen", "ForwardBatch", "Tail", "Tree", "ragged", "validate"]
