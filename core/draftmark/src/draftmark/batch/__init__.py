"""ForwardBatch: what one forward's attention is given, in the one form that all modes share."""

from .buffers import BatchBuffers, ragged
from .checks import validate
from .forward import Block, Causal, ForwardBatch, Tail, Tree

__all__ = ["BatchBuffers", "Block", "Causal", "ForwardBatch", "Tail", "Tree", "ragged", "validate"]
