"""Geometries that an NPU serves, as parameters of tests."""

from dataclasses import replace

from draftmark import AttentionShape, DraftShape, Geometry, Limits
from draftmark.geometry import DRAFT_MODES, TARGET_MODES

ATTENTION = AttentionShape(num_qo_heads=8, num_kv_heads=2, head_dim=128, page_size=128)
LIMITS = Limits(max_num_reqs=6, max_context_len=300, max_extend_tokens=48, capture_batch_sizes=(1, 4, 8))
TREE = DraftShape(topk=3, num_steps=4, num_draft_tokens=6)


def geometries() -> dict[str, Geometry]:
    """Return geometries that the contract's own cases lack: wide trees at the context limit, overlap, and MHA."""
    fp16 = AttentionShape(16, 2, 128, 128, "float16", "float16", softmax_scale=0.05)
    # At the context limit the draft tokens after the prefix begin a new page: sglang#22778.
    wall = Limits(max_num_reqs=3, max_context_len=256, max_extend_tokens=32, capture_batch_sizes=(2, 4))
    wide = DraftShape(topk=8, num_steps=3, num_draft_tokens=35)
    behind = replace(wall, overlap=True)
    small = AttentionShape(9, 3, 64, 128, "float16", "float16")  # heads and dtype of SmolLM2-135M
    own = AttentionShape(4, 4, 64, 128)
    return {
        "target": Geometry.create(ATTENTION, LIMITS, TREE, modes=TARGET_MODES),
        "draft": Geometry.create(ATTENTION, LIMITS, TREE, modes=DRAFT_MODES),
        "target-fp16-wall": Geometry.create(fp16, wall, wide, modes=TARGET_MODES),
        "draft-fp16-wall": Geometry.create(fp16, wall, wide, modes=DRAFT_MODES),
        "draft-chain": Geometry.create(ATTENTION, LIMITS, DraftShape(1, 4, 3), modes=DRAFT_MODES),
        "target-smollm2-overlap": Geometry.create(small, behind, TREE, modes=TARGET_MODES),
        "draft-smollm2-overlap": Geometry.create(small, behind, TREE, modes=DRAFT_MODES),
        "target-mha": Geometry.create(own, wall, TREE, modes=TARGET_MODES),
    }
