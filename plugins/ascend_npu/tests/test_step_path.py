"""Tests, by the emulator's call log, that a step's device calls include no AICPU operators."""

import pytest
import torch
from ascend_shapes import geometries

from draftmark_contract.cases.forward_sets import all_forwards
from draftmark_contract.harness.harness import Harness, place

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("emulated")]
SHAPES = {name: geometries()[name] for name in ("target", "draft", "target-mha")}
TURNS = [pytest.param(turn, id=f"{name}-{turn.name}") for name, g in SHAPES.items() for turn in all_forwards(g)]


def called(work):
    """Return the emulator's log of the calls made by `work`."""
    from emulator_log import calls

    with calls() as log:
        work()
    return log


@pytest.mark.parametrize("turn", TURNS[::3])
def test_no_forward_runs_on_the_aicpu(subject, turn):
    """Metadata, KV store and attention use no AICPU operator in any mode."""
    rig = Harness(subject, turn.geometry, turn.num_pages)
    turn = place(rig, turn)
    batch = rig.load(turn)
    rig.backend.plan(batch)

    def forward():
        rig.backend.write_metadata(batch)
        rig.layer(turn, batch)

    log = called(forward)
    assert any(line.startswith("aclnnFusedInfer") for line in log)
    assert [line for line in log if line.startswith("AICPU")] == []


def test_log_shows_aicpu_operators(subject):
    """The call log lists AICPU operators if draftmark's own tree operations run, so the log can detect them."""
    words = torch.ones(4, dtype=torch.int32, device="npu")
    positions = torch.arange(4, device="npu")
    log = called(lambda: (words >> positions.int(), positions // 2, positions % 2, positions.int() // 2))
    assert [line for line in log if line.startswith("AICPU")] == ["AICPU aclnnRightShift", "AICPU aclnnFloorDivides"]


def test_tree_operations_match_torch_without_the_aicpu():
    """Mask words with all 32 bits, depths and positions equal torch's results, without AICPU operators."""
    from draftmark import Mode
    from draftmark.runtime import BatchBuffers, TorchTreeOps, Unknown
    from draftmark_ascend_npu.tree_ops import AscendTreeOps

    geometry = geometries()["target-fp16-wall"]
    reqs, nodes = geometry.max_reqs, geometry.draft.num_draft_tokens
    dice = torch.Generator().manual_seed(0)
    parents = torch.tensor([[-1] + [int(torch.randint(0, j, (), generator=dice)) for j in range(1, nodes)]] * reqs)
    found = []
    for ops in (TorchTreeOps(geometry), AscendTreeOps(geometry, "npu")):
        buffers = BatchBuffers(geometry, "npu")
        buffers.prefix_lens.copy_(torch.arange(reqs, dtype=torch.int32) * 80)
        batch = buffers.uniform(Mode.VERIFY, 0, reqs, reqs, Unknown(reqs, geometry.max_prefix_len), tree=True)
        for tensor in (batch.tail.mask, batch.tail.depth, batch.positions):
            tensor.fill_(-7)
        log = called(lambda ops=ops, batch=batch: ops.write_tail(batch, parents.npu()))
        found.append([one.cpu() for one in (batch.tail.mask, batch.tail.depth, batch.positions)])
    assert [line for line in log if line.startswith("AICPU")] == []
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert (found[0][0] < 0).any(), "the test must use bit 31"


@pytest.mark.parametrize(
    ("name", "masked"), [("decode-edges", False), ("verify-edges-chain", True), ("extend-ragged", True)]
)
def test_single_rows_need_no_mask(subject, monkeypatch, name, masked):
    """Decode calls have no mask, as CANN's decode kernel requires. Verify and prefill calls have the causal mask."""
    from draftmark_ascend_npu import ops

    geometry = geometries()["target"]
    turn = next(one for one in all_forwards(geometry) if one.name == name)
    seen = []
    launch = ops.PagedAttention.launch
    monkeypatch.setattr(ops.PagedAttention, "launch", lambda self, *a: (seen.append(self.causal), launch(self, *a))[1])
    rig = Harness(subject, geometry, turn.num_pages)
    turn = place(rig, turn)
    rig.run(turn, rig.load(turn))
    assert [one is not None for one in seen] == [masked]
