"""Constants of the probes: request lengths and step counts of the draft rounds. Imports no torch."""

from __future__ import annotations

CONTEXT, STEPS, LENGTHS = 40, 4, (30, 29, 29)
"""Three requests far from the context's end, so that a buffer is too small only if a factor is missing in its size."""
AT_THE_END, STEPS_AT_THE_END = (CONTEXT - 4,) * 3, 6
"""Longest lengths that SGLang reaches, and steps.

SGLang ends a request 2 tokens below the context, and 2 further tokens are in flight: one pending, one of the round.
Draft tokens are not counted.
"""
