"""EXTEND's kernels of three models compiled for Hopper; no GPU is needed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import triton

from draftmark import DeviceProfile, Gate, Limits, Mode, Recurrence, StateGeometry, StateShape
from draftmark_cuda_triton.state.kernel_list import state_calls_of

MODELS = {
    "qwen3-next": StateShape(Recurrence.DELTA, Gate.HEAD, 32, 16, 128, 128, 0, 0, "bfloat16", round_prompts=True),
    "kimi-linear": StateShape(Recurrence.DELTA, Gate.KEY, 32, 32, 128, 128, 0, 0, "bfloat16", round_prompts=True),
    "nemotron-h": StateShape(Recurrence.DECAY, Gate.HEAD, 128, 8, 128, 64, 0, 0, "bfloat16", round_prompts=True),
}
SHARED_MEMORY = 227 << 10
MOST_SPILLS = 40
"""Instructions that store registers to memory; `prepare_key` has some in its rare branch."""


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_kernels_of_prompts_fit_a_hopper_multiprocessor(model, tmp_path):
    """Products use wgmma, registers hardly spill, and the tiles fit shared memory."""
    geometry = StateGeometry.create(
        MODELS[model], Limits(8, 8192, 2048), None, DeviceProfile("cuda", 90, 132), (Mode.EXTEND,)
    )
    tool = Path(triton.backends.__path__[0]) / "nvidia" / "bin" / "cuobjdump"
    own = [one for one in state_calls_of(geometry) if ".state_extend" in one.name]
    assert len(own) == (1 if model == "nemotron-h" else 2)
    for spec in own:
        compiled = spec.compile()
        assert compiled.metadata.shared <= SHARED_MEMORY, spec.name
        if tool.exists():
            (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
            command = [str(tool), "-sass", str(tmp_path / "kernel.cubin")]
            code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            assert code.count("HGMMA") >= 24 and code.count(" STL") <= MOST_SPILLS, spec.name
