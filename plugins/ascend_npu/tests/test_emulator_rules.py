"""Tests that the emulator accepts and rejects the same operator calls as CANN on a 910B."""

import pytest
import torch

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("emulated")]
BLOCK = 128


@pytest.fixture
def library():
    import torch_npu

    return torch_npu


def packed(library, heads=4, kv_heads=2, dim=128, rows=(2, 3), keys=(9, 4), block=BLOCK, causal=False, by_head=False):
    """Call the fused operator in TND (tokens, heads, dim) over pages, and return its output and log-sum-exp."""
    q = torch.randn(rows[-1], heads, dim).half().npu()
    shape = (4, kv_heads, block, dim) if by_head else (4, block, kv_heads * dim)
    k, v = (torch.randn(shape).half().npu() for _ in range(2))
    mask = torch.ones(2048, 2048, dtype=torch.int8).triu(1).npu() if causal else None
    return library.npu_fused_infer_attention_score(
        q, k, v, atten_mask=mask, actual_seq_lengths=list(rows), actual_seq_lengths_kv=list(keys),
        block_table=torch.arange(4, dtype=torch.int32).view(2, 2).npu(), num_heads=heads, num_key_value_heads=kv_heads,
        scale=0.1, input_layout="TND", sparse_mode=3 if causal else 0, block_size=block, softmax_lse_flag=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 72}, "multiples of 16 to 256"),
        ({"dim": 272}, "multiples of 16 to 256"),
        ({"kv_heads": 4, "dim": 80}, "takes 64, 128 or 192"),
        ({"block": 24}, "multiple of 16, at most 512"),
        ({"block": 528}, "multiple of 16, at most 512"),
        ({"causal": True, "keys": (1, 4)}, "1 keys for 2 rows"),
    ],
)
def test_tnd_refuses_what_cann_refuses(library, change, words):
    """In TND unsupported head sizes, unsupported page sizes, and causal rows without keys raise an error."""
    with pytest.raises(RuntimeError, match=words):
        packed(library, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"dim": 64},
        {"dim": 80},
        {"dim": 256},
        {"kv_heads": 4, "dim": 64},
        {"block": 16},
        {"block": 512},
        {"by_head": True},
    ],
)
def test_tnd_accepts_what_cann_accepts(library, change):
    """SmolLM2's heads, MHA, small pages, and pages with heads first run and give finite results."""
    out, lse = packed(library, **change)
    assert out.isfinite().all() and lse.isfinite().all()


def test_rows_without_keys_are_zero(library):
    """A request without keys has output 0 and log-sum-exp +inf, as with CANN's kernel; other requests are unchanged."""
    out, lse = packed(library, keys=(9, 0))
    assert (out[2:] == 0).all() and (lse[2:] == torch.inf).all() and lse[:2].isfinite().all()


@pytest.mark.parametrize("shape", [(3, 5), (1, 3, 5), (2, 3, 5), (2, 1, 3, 5), (1, 1, 3, 5), (2, 1, 8, 32)])
def test_dense_mask_shapes(library, shape):
    """In BSND (batch, rows, heads, dim) a dense mask can have fewer axes, and can be larger than rows by keys."""
    q = torch.randn(2, 3, 4, 64).half()
    k, v = (torch.randn(2, 5, 2, 64).half() for _ in range(2))
    mask = torch.zeros(shape, dtype=torch.int8)
    mask[..., 1] = 1
    call = {"num_heads": 4, "num_key_value_heads": 2, "scale": 0.1, "input_layout": "BSND", "sparse_mode": 0}
    out, _ = library.npu_fused_infer_attention_score(q.npu(), k.npu(), v.npu(), atten_mask=mask.npu(), **call)
    kept = [0, 2, 3, 4]
    want, _ = library.npu_fused_infer_attention_score(
        q.npu(), *(one[:, kept].contiguous().npu() for one in (k, v)), **call
    )
    torch.testing.assert_close(out.cpu(), want.cpu())  # not bit-equal: a masked key can change a sum's order


def test_lengths_in_a_padded_layout(library):
    """In BSND the length lists have the rows and keys of each request, not running sums."""
    q = torch.randn(2, 3, 4, 64).half()
    k, v = (torch.randn(2, 5, 2, 64).half() for _ in range(2))
    call = {"num_heads": 4, "num_key_value_heads": 2, "scale": 0.1, "input_layout": "BSND"}
    lists = {"actual_seq_lengths": [3, 2], "actual_seq_lengths_kv": [5, 2]}
    out, _ = library.npu_fused_infer_attention_score(q.npu(), k.npu(), v.npu(), **lists, **call)
    second = (one[1:, :2].contiguous().npu() for one in (q, k, v))
    want, _ = library.npu_fused_infer_attention_score(*second, **call)
    torch.testing.assert_close(out[1, :2].cpu(), want[0].cpu())


def test_float8_cannot_be_filled(library):
    """Filling a float8 tensor raises an error, because a 910B has no kernel for it. Filling its bytes works."""
    tensor = torch.empty(64, dtype=torch.uint8, device="npu").view(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match="float8 cannot be filled"):
        tensor.fill_(0)
    tensor.view(torch.uint8).fill_(0)
    assert (tensor.view(torch.uint8) == 0).all()


WORKSPACE = """
import torch, torch_npu
from draftmark_ascend_npu.ops import PagedAttention
q, out = (torch.randn(2, 4, 128).half().npu() for _ in range(2))
k, v = (torch.randn(24, 128, 2, 128).half().npu() for _ in range(2))
tables = torch.arange(24, dtype=torch.int32).view(2, 12).npu()
one = PagedAttention(q, k, v, tables, None, 0.1, out, torch.empty(1).npu())
one.launch([1, 2], {keys}, {workspace})
torch.npu.synchronize()
print("ran")
"""


def test_workspace_for_short_lists_is_too_small(run_in_new_process):
    """A workspace for short length lists is too small for long lists. The queried maximum workspace suits each list."""
    small, largest = "torch.empty(1 << 20, dtype=torch.uint8, device='npu')", "one.workspace([1, 2], [1, 1])"
    for keys, workspace in (([5, 7], small), ([5, 1500], largest)):
        done = run_in_new_process(WORKSPACE.format(keys=keys, workspace=workspace))
        assert "ran" in done.stdout, done.stderr[-2000:]
    done = run_in_new_process(WORKSPACE.format(keys=[5, 1500], workspace=small))
    assert done.returncode != 0 and "needs a workspace of 1245184 bytes, got 1048576" in done.stderr
