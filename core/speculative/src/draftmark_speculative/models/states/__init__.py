"""Layers with recurrent state: token mixers over the weights of a transformers model that run in a `StateRun`."""

from .hybrid import HybridLayers, open_states
from .probe import ProbeStates
from .step import StateRun, StateStep

__all__ = ["HybridLayers", "ProbeStates", "StateRun", "StateStep", "open_states"]
