"""ForwardBatch: what one forward's attention is told, in the one form that all five modes share."""

from .buffers import BatchBuffers, ragged
from .checks import validate
from .forward import Causal, ForwardBatch, Tail, Tree

__all__ = ["BatchBuffers", "Causal", "ForwardBatch", "Tail", "Tree", "ragged", "validate"]
