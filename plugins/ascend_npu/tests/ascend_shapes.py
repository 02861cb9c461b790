"""Geometries that an NPU serves, for tests to run over."""

from draftmark import AttentionShape, DraftShape, Geometry, Limits
from draftmark.geometry import DRAFT_MODES, TARGET_MODES

ATTENTION = AttentionShape(num_qo_heads=8, num_kv_heads=2, head_dim=128, page_size=128)
LIMITS = Limits(max_num_reqs=6, max_context_len=300, max_extend_tokens=48, capture_batch_sizes=(1, 4, 8))
TREE = DraftShape(topk=3, num_steps=4, num_draft_tokens=6)


def geometries() -> dict[str, Geometry]:
    """What an NPU serves and the suite's own behaviour checks lack: pages of 128, heads of 128, and trees."""
    fp16 = AttentionShape(16, 2, 128, 128, "float16", "float16", softmax_scale=0.05)
    # The tail of a request at the wall begins a page of its own: sglang#22778.
    wall = Limits(max_num_reqs=3, max_context_len=256, max_extend_tokens=32, capture_batch_sizes=(2, 4))
    wide = DraftShape(topk=8, num_steps=3, num_draft_tokens=35)
    return {
        "target": Geometry.create(ATTENTION, LIMITS, TREE, modes=TARGET_MODES),
        "draft": Geometry.create(ATTENTION, LIMITS, TREE, modes=DRAFT_MODES),
        "target-fp16-wall": Geometry.create(fp16, wall, wide, modes=TARGET_MODES),
        "draft-fp16-wall": Geometry.create(fp16, wall, wide, modes=DRAFT_MODES),
        "draft-chain": Geometry.create(ATTENTION, LIMITS, DraftShape(1, 4, 3), modes=DRAFT_MODES),
    }
