"""Forward batches: errors of validate(), contents of uniform and ragged batches, and fixed addresses."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace

import pytest
import torch

from draftmark import Mode
from draftmark.batch import BatchBuffers, Causal, ForwardBatch, Tree, ragged, validate
from draftmark.errors import BatchError
from draftmark.lengths import Exact, Unknown, UpperBound


@pytest.fixture
def geometry(make_geometry):
    """Return a geometry with up to 6 requests including padding, trees of 5 nodes, and 3 branches per draft step."""
    return make_geometry(num_draft_tokens=5, topk=3, num_steps=3, max_num_reqs=4, capture_batch_sizes=(6,), page_size=4)


@pytest.fixture
def verify(geometry):
    """Return a VERIFY batch with draft trees: two live requests, padded to three."""
    return BatchBuffers(geometry, "cpu").uniform(Mode.VERIFY, 0, 3, 2, Exact((9, 4)), tree=True)


@pytest.fixture
def extend(geometry):
    """Return an EXTEND batch of three requests with 4, 1 and 3 new tokens."""
    return extend_batch(geometry, (4, 1, 3), (0, 7, 2))


def extend_batch(geometry, q_lens, prefixes, host=None, num_reqs=None):
    """Return an EXTEND batch with a page table of zeros."""
    table = torch.zeros(len(q_lens), geometry.max_pages_per_req, dtype=torch.int32)
    lens = torch.tensor(prefixes, dtype=torch.int32)
    host = host or Exact(tuple(prefixes[:num_reqs]))
    return ragged(geometry, lens, table, q_lens, host, num_reqs)


def test_good_batches_are_returned(geometry, verify, extend):
    """validate() returns the batch, in every mode and with every kind of host lengths."""
    assert validate(verify, geometry) is verify
    assert validate(extend, geometry) is extend
    buffers = BatchBuffers(geometry, "cpu")
    for mode, step in [(Mode.DECODE, 0), (Mode.DRAFT, 0), (Mode.DRAFT, 1), (Mode.VERIFY, 0), (Mode.DRAFT_EXTEND, 0)]:
        for host in (Exact((1, 2)), UpperBound((3, 4)), Unknown(2, geometry.max_prefix_len)):
            validate(buffers.uniform(mode, step, 6, 2, host, tree=mode is Mode.DRAFT), geometry)


def grown(tensor):
    """Return the tensor with one more row."""
    return torch.cat([tensor, tensor[:1]])


CONTRADICTIONS = {
    "more live than padded": (lambda b: replace(b, num_reqs=4), ("num_reqs is 4", "3")),
    "negative live": (lambda b: replace(b, num_reqs=-1, host=Exact(())), ("num_reqs is -1",)),
    "host lengths for another batch": (lambda b: replace(b, host=Exact((9,))), ("cover 1", "2 are live")),
    "negative host length": (lambda b: replace(b, host=Exact((9, -1))), ("-1",)),
    "host length past the limit": (lambda b: replace(b, host=Exact((9, 10**6))), ("1000000",)),
    "prefix_lens too long": (lambda b: replace(b, prefix_lens=grown(b.prefix_lens)), ("prefix_lens", "[4]", "[3]")),
    "prefix_lens 64-bit": (lambda b: replace(b, prefix_lens=b.prefix_lens.long()), ("prefix_lens", "int64", "int32")),
    "q_indptr without its end": (lambda b: replace(b, q_indptr=b.q_indptr[:-1]), ("q_indptr", "[3]", "[4]")),
    "page_table too narrow": (lambda b: replace(b, page_table=b.page_table[:, :-1]), ("page_table", "int32")),
    "positions 32-bit": (lambda b: replace(b, positions=b.positions.int()), ("positions", "int64")),
    "positions too few": (lambda b: replace(b, positions=b.positions[:-1]), ("positions", "[14]", "[15]")),
    "mask with too few words": (
        lambda b: replace(b, tail=Tree(b.tail.mask[:, :0], b.tail.depth)),
        ("tail.mask", "[15, 0]", "[15, 1]"),
    ),
    "mask as bool": (lambda b: replace(b, tail=Tree(b.tail.mask.bool(), b.tail.depth)), ("tail.mask", "bool")),
    "depth transposed": (lambda b: replace(b, tail=Tree(b.tail.mask, b.tail.depth.T)), ("tail.depth", "[5, 3]")),
    "ragged rows in a uniform mode": (lambda b: replace(b, q_lens=(5, 4, 6)), ("verify", "5 rows", "(5, 4, 6)")),
    "tail of another length": (
        lambda b: replace(b, tail=Causal(), tail_lens=(6, 6, 6)),
        ("5 tail slots", "(6, 6, 6)"),
    ),
    "more padding than the geometry has": (
        lambda b: replace(
            b,
            **{name: torch.cat([getattr(b, name)] * 3) for name in ("prefix_lens", "page_table", "positions")},
            q_indptr=torch.arange(10, dtype=torch.int32) * 5,
            tail=Causal(),
            q_lens=(5,) * 9,
            tail_lens=(5,) * 9,
        ),
        ("9", "6"),
    ),
    "a draft step that does not exist": (
        lambda b: replace(
            b,
            mode=Mode.DRAFT,
            step=2,
            q_indptr=b.q_indptr,
            positions=b.positions[:9],
            tail=Tree(b.tail.mask[:9], torch.zeros(3, 9, dtype=torch.int32)),
            q_lens=(3,) * 3,
            tail_lens=(9,) * 3,
        ),
        ("step", "2"),
    ),
    "draft branches without a tree": (
        lambda b: replace(
            b, mode=Mode.DRAFT, positions=b.positions[:9], tail=Causal(), q_lens=(3,) * 3, tail_lens=(3,) * 3
        ),
        ("draft",),
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_raises_one_line(geometry, verify, name):
    """A tensor or host number that contradicts the others raises BatchError with value, limit and remedy."""
    break_it, words = CONTRADICTIONS[name]
    with pytest.raises(BatchError) as caught:
        validate(break_it(verify), geometry)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "\n" not in text


def test_a_mode_outside_the_geometry_is_refused(make_geometry, geometry, verify):
    """A draft model's geometry rejects VERIFY; the error lists the modes that it serves."""
    with pytest.raises(BatchError, match="mode is verify, but the geometry serves extend, draft"):
        validate(verify, replace(geometry, modes=(Mode.EXTEND, Mode.DRAFT)))


def test_extend_past_the_row_limit_is_refused(geometry):
    """An EXTEND batch of 17 tokens, one above the limit, raises an error with both numbers and the remedy."""
    with pytest.raises(BatchError, match="17 tokens, but max_extend_tokens is 16; split"):
        extend_batch(geometry, (9, 8), (0, 0))


@pytest.mark.parametrize("q_lens", [(5, -1), (-1,)])
def test_negative_new_tokens_are_refused(geometry, q_lens):
    """A negative number of new tokens raises BatchError, not a torch error."""
    with pytest.raises(BatchError, match="-1"):
        validate(extend_batch(geometry, q_lens, (0,) * len(q_lens)), geometry)


@pytest.mark.parametrize("q_lens", [(), (0,), (0, 0, 0)])
def test_an_extend_without_rows_is_refused(geometry, extend, q_lens):
    """An EXTEND batch without new tokens is refused where it is made and where it is validated."""
    refusal = "an EXTEND has at least one new token; skip the forward"
    with pytest.raises(BatchError, match=refusal):
        extend_batch(geometry, q_lens, (0,) * len(q_lens))
    if not q_lens:
        return
    indptr, table = torch.zeros(len(q_lens) + 1, dtype=torch.int32), extend.page_table[: len(q_lens)]
    empty = replace(extend, q_indptr=indptr, page_table=table, prefix_lens=extend.prefix_lens[: len(q_lens)])
    empty = replace(empty, positions=extend.positions[:0], q_lens=q_lens, tail_lens=q_lens, num_rows=0)
    with pytest.raises(BatchError, match=refusal):
        validate(replace(empty, num_reqs=len(q_lens), host=Exact((0,) * len(q_lens))), geometry)


def test_an_extend_tail_must_equal_its_rows(geometry, extend):
    """An EXTEND batch with different tail_lens and q_lens is refused: every new token is a row and a tail slot."""
    with pytest.raises(BatchError):
        validate(replace(extend, tail_lens=(5, 1, 3)), geometry)


def test_uniform_batches_follow_the_extent_of_the_mode(geometry):
    """In a uniform batch q_indptr increases by the mode's rows per request, and padded requests have rows too."""
    buffers = BatchBuffers(geometry, "cpu")
    for mode, step, q, t in [
        (Mode.DECODE, 0, 1, 1), (Mode.DRAFT, 1, 3, 6), (Mode.VERIFY, 0, 5, 5), (Mode.DRAFT_EXTEND, 0, 5, 5)
    ]:  # fmt: skip
        batch = buffers.uniform(mode, step, 6, 4, Exact((0,) * 4), tree=mode is Mode.DRAFT)
        assert batch.q_indptr.tolist() == [q * i for i in range(7)]
        assert batch.q_indptr.dtype == torch.int32
        assert (batch.q_lens, batch.tail_lens) == ((q,) * 6, (t,) * 6)
        assert (batch.padded_reqs, batch.num_reqs, batch.num_rows) == (6, 4, 6 * q)
        assert batch.uniform
        assert isinstance(batch.tail, Tree if mode is Mode.DRAFT else Causal)


def test_ragged_batches_concatenate_their_rows(geometry, extend):
    """In an EXTEND batch q_indptr is the running sum of q_lens, and each request's positions continue its prefix."""
    assert extend.q_indptr.tolist() == [0, 4, 5, 8]
    assert extend.positions.tolist() == [0, 1, 2, 3, 7, 2, 3, 4]
    assert (extend.q_indptr.dtype, extend.positions.dtype) == (torch.int32, torch.int64)
    assert (extend.q_lens, extend.tail_lens, extend.uniform) == ((4, 1, 3), (4, 1, 3), False)
    assert extend_batch(geometry, (2, 2), (0, 0)).uniform is False


def test_padded_requests_of_a_ragged_batch_have_no_rows(geometry):
    """Padded requests of an EXTEND batch follow the live ones and have no rows; host lengths do not include them."""
    batch = validate(extend_batch(geometry, (3, 2, 0, 0), (1, 0, 0, 0), num_reqs=2), geometry)
    assert batch.q_indptr.tolist() == [0, 3, 5, 5, 5]
    assert batch.positions.tolist() == [1, 2, 3, 0, 1]


def test_positions_are_clamped_to_the_context(geometry):
    """Positions never exceed max_context_len - 1, the end of the model's rotary tables."""
    batch = extend_batch(geometry, (4,), (30,))
    assert batch.positions.tolist() == [30, 31, 31, 31]


def test_batches_of_one_padded_size_share_addresses(geometry):
    """For any number of live requests, tensors of one padded size have equal addresses, so graphs stay valid."""
    buffers = BatchBuffers(geometry, "cpu")

    def addresses(num_reqs, padded=6):
        batch = buffers.uniform(Mode.VERIFY, 0, padded, num_reqs, Exact((0,) * num_reqs), tree=True)
        tensors = [batch.prefix_lens, batch.q_indptr, batch.page_table, batch.positions, batch.tail.mask]
        return [(tensor.data_ptr(), tuple(tensor.shape)) for tensor in [*tensors, batch.tail.depth]]

    first = addresses(6)
    buffers.uniform(Mode.DRAFT, 1, 3, 1, Exact((0,)), tree=True)
    assert addresses(2) == first
    assert [pointer for pointer, _ in addresses(4, padded=4)] == [pointer for pointer, _ in first]


def test_static_buffers_hold_the_largest_batch_of_each_mode(make_geometry):
    """Each mode and draft step gives a valid batch at the largest captured size, also with several mask words."""
    geometry = make_geometry(num_draft_tokens=40, topk=3, num_steps=4, capture_batch_sizes=(2, 7), max_extend_tokens=5)
    buffers = BatchBuffers(geometry, "cpu")
    for mode, steps in [(Mode.DECODE, 1), (Mode.DRAFT, 3), (Mode.VERIFY, 1), (Mode.DRAFT_EXTEND, 1)]:
        for step in range(steps):
            batch = buffers.uniform(mode, step, 7, 0, Exact(()), tree=True)
            assert validate(batch, geometry).padded_reqs == 7


def test_a_batch_cannot_be_made_without_host_lengths(verify):
    """`host` has no default: a batch without it raises TypeError at construction. Only two fields have a default."""
    defaults = [f.name for f in fields(ForwardBatch) if f.default is not MISSING or f.default_factory is not MISSING]
    assert defaults == ["state_slots", "chosen"]
    kept = {f.name: getattr(verify, f.name) for f in fields(verify) if f.name != "host"}
    with pytest.raises(TypeError, match="host"):
        ForwardBatch(**kept)


def test_stale_memory_after_the_live_part_is_not_in_the_batch(geometry):
    """A batch of three requests over buffers of six contains three requests: no tensor includes the other rows."""
    buffers = BatchBuffers(geometry, "cpu")
    full = buffers.uniform(Mode.VERIFY, 0, 6, 6, Exact((0,) * 6), tree=True)
    for tensor in (full.prefix_lens, full.page_table, full.positions, full.tail.mask, full.tail.depth):
        tensor.fill_(99)
    batch = buffers.uniform(Mode.VERIFY, 0, 3, 2, Exact((0, 0)), tree=True)
    for tensor in (batch.prefix_lens, batch.page_table, batch.positions, batch.tail.mask, batch.tail.depth):
        tensor.zero_()
    assert not batch.tail.mask.any() and batch.tail.depth.shape == (3, 5)
    assert (full.prefix_lens[3:] == 99).all() and (full.tail.depth[3:] == 99).all()
