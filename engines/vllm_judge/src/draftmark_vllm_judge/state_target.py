"""Lets the judge test vLLM's layers with recurrent state: GDN_ATTN and MAMBA2_ATTN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from draftmark_contract.judge.states.driver import StateCapabilities
from draftmark_contract.judge.states.layer import Family, layer_of
from draftmark_contract.judge.states.questions import questions
from draftmark_contract.runner.item import Item

FAMILIES = {"GDN_ATTN": Family.GDN, "MAMBA2_ATTN": Family.MAMBA2}
"""vLLM's names of backends with recurrent state."""
LAYERS = {
    Family.GDN: (
        layer_of("h4", Family.GDN, (4, 2), (64, 64), "bfloat16"),
        layer_of("h8-k128", Family.GDN, (8, 8), (128, 128), "bfloat16"),
    ),
    Family.MAMBA2: (
        layer_of("h4", Family.MAMBA2, (4, 1), (64, 32), "float32", conv_bias=True),
        layer_of("h8-g2", Family.MAMBA2, (8, 2), (128, 64), "float32"),
    ),
}
"""Layers to judge. vLLM's GDN kernels for CPUs take rows in bfloat16 only."""
ROUNDED = {Family.GDN: 4e-2, Family.MAMBA2: 1e-4}
"""Largest relative error of a row and of a state."""
ATTENTION = "a rule about attention, or about draftmark's own interface"
LEFT_OUT = {
    "state": "a rule about slots, checkpoints, ranks or memory, which one layer does not have",
    "state.verify_leaves_the_slot": "a row of a verify overwrites the first column: vLLM cannot keep none of a "
    "verify's rows (vllm#56419)",
    "state.padding_touches_no_slot": "vLLM pads requests for full graphs only, which a CPU has not",
    "state_graphs": "a CPU has no graphs",
}


class StateTarget:
    """Describes vLLM's layers of one kind to the judge; implements `draftmark_contract.judge.target.Target`."""

    def __init__(self, name: str, device: str) -> None:
        self.family, self.device = FAMILIES[name], device

    @property
    def facts(self) -> Mapping[str, str]:
        """Releases of vLLM and torch, and the device."""
        import vllm

        return {"engine": f"vLLM {vllm.__version__}", "torch": f"torch {torch.__version__}", "device": self.device}

    @property
    def left_out(self) -> Mapping[str, str]:
        """Rules without an item: those of attention, and those that a form of state columns cannot meet."""
        from draftmark_contract.judge.rules import rules

        return {**{name.partition(".")[0]: ATTENTION for name in rules()}, **LEFT_OUT}

    def items(self) -> Sequence[Item]:
        """Return the items of all layers of this kind."""
        from .states import StateColumns

        return questions(
            StateCapabilities(
                open=StateColumns,
                layers=LAYERS[self.family],
                decodes=True,
                padded=False,
                mixed=True,
                rounded=ROUNDED[self.family],
            )
        )
