"""Shapes of attention and state layers from Hugging Face configurations. Integers only, no torch."""

from .latent import latent_shape
from .state import StateFacts, state_facts, state_shape

__all__ = ["StateFacts", "latent_shape", "state_facts", "state_shape"]
