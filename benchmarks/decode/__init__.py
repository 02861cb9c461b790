"""Whole loops: how fast they decode, whether their texts are the model's own, and what their parts cost."""
