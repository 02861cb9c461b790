"""Checks of latent rows of 656 bytes, in which each 128 e4m3 numbers have a scale and the rest is bfloat16.

The engine stores such rows. A correct backend reads the numbers exactly: value times scale, and the rest as it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from draftmark.geometry import Form, Geometry, Mode

from ..behaviour import Fixture, behaviour, on_device_only
from ..cases import latent_formats as cases
from ..cases.contents import Contents
from ..cases.forwards import ForwardCase
from ..cases.graph_rounds import key_of
from ..cases.latent import SINCE
from ..check import ContractViolation, Tier, check
from ..sizing.batches import brief
from ..sizing.claims import KINDS
from .production import assert_forward

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest
    from ..harness.harness import Harness

QUERIES = 12.0
"""Factor on the random queries of one block of a row, so that only this block decides the weights."""


@behaviour(Fixture.FORWARDS, cases=cases.each_mode, since=SINCE)
def rows_of_656_bytes_are_exact(harness: Harness, forwards: list[ForwardCase]) -> None:
    """Rows of 512 e4m3 numbers, four float32 scales and 64 bfloat16 numbers are read exactly, in every mode.

    Scales of neighbouring blocks and rows differ, and are no powers of two. The backend writes no KV.
    """
    for number, forward in enumerate(forwards):
        for contents in (Contents.USUAL, Contents.NEEDLES):
            batch = harness.load(forward, contents=contents, seed=number)
            watch = harness.watch(forward, batch)
            harness.assert_forward(forward, batch)
            watch.assert_unchanged_except(("out",), "a forward")


@behaviour(Fixture.FORWARDS, cases=cases.some_modes, since=SINCE)
def each_block_has_its_scale(harness: Harness, forwards: list[ForwardCase]) -> None:
    """Weights are right when queries are zero outside of one block of 128 numbers, or outside of the rest."""
    from ..oracle.row_format import BLOCK

    for number, forward in enumerate(forwards):
        dim = harness.geometry.attention.head_dim
        for first in range(0, dim, BLOCK):
            batch = harness.load(forward, seed=number)
            q = harness.tensors.q
            q[..., :first], q[..., first + BLOCK :] = 0, 0
            q *= QUERIES
            end = min(first + BLOCK, dim)
            harness.assert_forward(forward, batch, f"with queries in elements {first} to {end} only the output")


@behaviour(Fixture.FORWARDS, cases=cases.some_modes, since=SINCE, bugs=("vllm#43961",))
def parts_of_unseen_rows_reach_no_output(harness: Harness, forwards: list[ForwardCase]) -> None:
    """NaN in the numbers, the scales or the rest of rows that no row sees reaches no output."""
    from ..oracle.row_format import PARTS

    for number, forward in enumerate(forwards):
        for part, where in PARTS.items():
            batch = harness.load(forward, seed=number)
            _fill_unseen(harness, forward, where)
            harness.assert_forward(forward, batch, f"with NaN in the {part} of unseen rows the output")


def _fill_unseen(harness: Harness, forward: ForwardCase, part: slice) -> None:
    """Set all bits of this part of every row that no live row sees, except null pages, and zero its other bytes."""
    import torch

    from ..harness.tensors import used_slots

    tensors, page = harness.tensors, forward.geometry.attention.page_size
    rows = tensors.stored["rows"].view(torch.uint8)
    kept = [*range(forward.null_pages * page), *used_slots(forward)]
    unseen = torch.ones(tensors.num_pages * page, dtype=torch.bool, device=rows.device)
    unseen[torch.tensor(kept, device=rows.device)] = False
    fill = torch.zeros(rows.shape[-1], dtype=torch.uint8, device=rows.device)
    fill[part] = 255
    rows[unseen.view(rows.shape[:2])] = fill


@behaviour(Fixture.FORWARDS, cases=cases.graphs, since=SINCE)
def replays_read_other_rows(harness: Harness, rounds: list[ForwardCase]) -> None:
    """Graphs captured from the largest size down are right for other rows of 656 bytes, lengths and lists."""
    from ..harness.graph_harness import GraphHarness

    graphs = GraphHarness(harness)
    for number, forward in enumerate(rounds):
        key = key_of(forward)
        if key not in graphs.forms:
            graphs.record(key, graphs.load(forward, host="unknown" if harness.bounded else "exact"))
        else:
            graphs.assert_replay(key.program, graphs.load_replay(forward, number, poison=number % 2 == 0))


@behaviour(Fixture.FORWARD, cases=cases.crowds, since=SINCE)
def a_crowd_is_right(harness: Harness, forward: ForwardCase) -> None:
    """A batch of 24 requests, the longest with over 2,048 keys of 656 bytes, is right in every mode."""
    assert_forward(harness, forward, Contents.WEIGHED)


@behaviour(Fixture.LARGE_POOL, cases=cases.far, since=SINCE, bugs=("vllm#47671", "flashinfer#3136"))
def rows_may_lie_past_int32(harness: Harness, forward: ForwardCase) -> None:
    """Rows are read where slot · 656 does not fit 32 bits."""
    harness.run(forward, harness.load(forward))
    harness.assert_sparse_pool(forward)


@on_device_only(Fixture.FORWARD, cases=cases.full_size, since=SINCE)
def full_size_is_right_on_device(harness: Harness, forward: ForwardCase) -> None:
    """Outputs are right on the device for 33 requests with rows of 656 bytes, over all keys and over lists."""
    assert_forward(harness, forward, Contents.USUAL, Contents.NEEDLES)


@check(tier=Tier.SIZING, cases=cases.claims, since=SINCE)
def claims_are_served(subject: BackendUnderTest, geometry: Geometry) -> None:
    """A backend that claims a format in BackendInfo.row_formats serves its rows in some shape on some device."""
    info, a = subject.backend.info, geometry.attention
    claimed = a.row_format in info.row_formats and (info.chosen_keys or not a.chosen_width)
    if not claimed:
        subject.require(geometry)
    devices = (subject.profile, *KINDS.get(subject.profile.kind, ()))
    decoding = tuple(mode for mode in geometry.modes if mode is not Mode.EXTEND)
    pages = [replace(a, page_size=size, num_qo_heads=heads) for size in (64, 1, 16, 128) for heads in (16, 64, 128)]
    ways = (
        replace(geometry, attention=shape, device=device, modes=modes, forms=forms)
        for shape in pages
        for device in devices
        for modes in (geometry.modes, decoding)
        for forms in (geometry.forms, (*geometry.forms, Form.STRIDED_KV))
    )
    if all(subject.backend.supports(one) for one in ways):
        raise ContractViolation(
            "a row format that BackendInfo claims is refused for every shape that the suite has",
            batch=brief(geometry),
            got=subject.backend.supports(subject.fit(geometry)),
            expected="some geometry with it is served, on this device or another one",
            formula="BackendInfo.row_formats",
            remedy="claim only what is served: engines plan by these claims",
        )
