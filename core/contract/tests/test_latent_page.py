"""The size table of ``docs/latent.md`` is that of the formulas."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftmark import DeviceProfile, DraftShape, Geometry, Limits, Mode, load
from draftmark_contract.sizing import latent_schedules as schedules
from draftmark_tools.cli.sizing import sizing
from draftmark_tools.models import latent_shape

PAGE = Path(__file__).resolve().parents[3] / "docs" / "latent.md"
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
CAPTURED = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def _geometry(heads: int, ranks: int, draft: DraftShape, context: int) -> Geometry:
    shape = latent_shape(MLA | {"num_attention_heads": heads}, ranks=ranks, page_size=64)
    return Geometry.create(shape, Limits(256, context, 8192, CAPTURED), draft, DeviceProfile("cuda", 90, 132))


KIMI_K2 = _geometry(64, 8, DraftShape(4, 5, 32), 131_072)
DEEPSEEK_V3 = _geometry(128, 16, DraftShape(num_draft_tokens=4), 163_840)


def _sizes(geometry: Geometry) -> dict[str, int]:
    """Return the bytes, or works, of each row of the table."""
    requests, sms, a = geometry.max_reqs, geometry.device.num_sms, geometry.attention
    sized, packed = sizing(load("reference"), geometry), schedules.packed_rows(geometry, Mode.VERIFY)
    table = next(one.nbytes for one in sized.batch if one.name == "page_table")
    extend = geometry.limits.max_extend_tokens
    return {
        "draftmark, page table": table,
        "draftmark, other batch tensors": sized.batch_bytes - table,
        "reference, lengths and slots": sized.buffer_bytes,
        "cuda_triton, all buffers": sizing(load("cuda_triton"), geometry).buffer_bytes,
        "FlashMLA, tile schedule": 4 * schedules.FLASHMLA_ENTRY * schedules.flashmla_parts(a.num_qo_heads, sms),
        "FlashMLA, splits": 4 * (requests + 1),
        "FlashMLA, partial results": 4 * schedules.flashmla_partials_bound(requests, packed, a.value_width, sms),
        "FlashAttention 3 in vLLM, scheduler": 4 * schedules.flash_attention_3_reserved(requests),
        "FlashInfer, works of a verify": schedules.flashinfer_works(requests, packed, sms),
        "FlashInfer, works of an 8,192-row prefill": schedules.flashinfer_extend_works(
            requests, extend, a.num_qo_heads, sms
        ),
    }


@pytest.mark.parametrize(("column", "geometry"), [(3, KIMI_K2), (4, DEEPSEEK_V3)], ids=["kimi-k2", "deepseek-v3"])
def test_the_page_prints_the_formulas_results(column: int, geometry: Geometry) -> None:
    """Each row of the table has the number that the formula gives, and the table has no other row."""
    table = PAGE.read_text(encoding="utf-8").partition("| buffer |")[2]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")]
    shown = {row[1].strip().removesuffix(" (limit 16,384)"): row[column].strip() for row in rows}
    assert shown == {name: f"{size:,}" for name, size in _sizes(geometry).items()}
    assert geometry.row_bytes == 1152 and geometry.attention.num_qo_heads == 8
