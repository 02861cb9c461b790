"""Checks of latent layers (MLA, absorbed): a key is a whole row, its value the first elements of that row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..behaviour import Fixture, behaviour, on_device_only
from ..cases import latent as cases
from ..cases import latent_sizes as sizes
from ..cases.contents import Contents
from ..cases.forwards import ForwardCase
from ..check import Case
from .production import assert_forward, assert_served_or_named

if TYPE_CHECKING:
    import torch

    from ..backend_under_test import BackendUnderTest
    from ..cases.latent import Special
    from ..harness.harness import Harness
    from ..harness.layer_harness import LayerHarness

SINCE = cases.SINCE
QUERIES = 24.0
"""Factor on the random queries of one part of a row, so that only this part decides the weights."""


def _forwards() -> list[Case]:
    return cases.each_mode(sets=("plain", "core", "ragged"))


@behaviour(Fixture.FORWARDS, cases=_forwards, since=SINCE)
def values_are_the_leading_part(harness: Harness, forwards: list[ForwardCase]) -> None:
    """Weights come from all elements of a row, and values are its first value_dim elements.

    One forward has queries that are zero in the value part, and one has queries that are zero in the rest.
    """
    value_dim = harness.geometry.attention.value_width
    for number, forward in enumerate(forwards):
        harness.assert_forward(forward, harness.load(forward, seed=number))
        for part, others in ((slice(value_dim), slice(value_dim, None)), (slice(value_dim, None), slice(value_dim))):
            batch = harness.load(forward, seed=number)
            q = harness.tensors.q
            if q[..., part].shape[-1]:
                q[..., others] = 0
                q[..., part] *= QUERIES * (64 / q[..., part].shape[-1]) ** 0.5
                what = f"with queries in elements {part.start or 0} to {part.stop or q.shape[-1]} only the output"
                harness.assert_forward(forward, batch, what)


@behaviour(Fixture.FORWARDS, cases=cases.scales, since=SINCE)
def scale_is_the_geometrys(harness: Harness, forwards: list[ForwardCase]) -> None:
    """The softmax scale of a latent layer is the geometry's, with yarn's factor, and not one of its row's width."""
    for number, forward in enumerate(forwards):
        for contents in (Contents.USUAL, Contents.SPREAD):
            harness.assert_forward(forward, harness.load(forward, contents=contents, seed=number))


@behaviour(Fixture.FORWARD, cases=cases.rows_and_heads, since=SINCE, bugs=("aiter#2720", "vllm#27368", "sglang#11012"))
def rows_and_heads_may_be_any(harness: Harness, forward: ForwardCase) -> None:
    """Outputs are right for 1 to 64 rows of a request with 1 to 128 heads, of any product and parity."""
    assert_forward(harness, forward, Contents.USUAL)


@behaviour(Fixture.FORWARDS, cases=cases.trees, since=SINCE)
def trees_may_begin_in_any_page(harness: Harness, forwards: list[ForwardCase]) -> None:
    """Trees are right on pages of 1 to 128 tokens, and of 48, with tails over up to three pages.

    The prefixes end on both sides of page boundaries.
    """
    for forward in forwards:
        assert_forward(harness, forward, Contents.NEEDLES if forward.name == "deep" else Contents.USUAL)


@behaviour(Fixture.FORWARDS, cases=_forwards, since=SINCE, bugs=("vllm#43961", "vllm#33664"))
def sees_nothing_else(harness: Harness, forwards: list[ForwardCase]) -> None:
    """NaN or infinity in the value parts or in the rests of slots that no row sees reaches no output."""
    import torch

    value_dim = harness.geometry.attention.value_width
    for number, (forward, bad) in enumerate(zip(forwards, ("nan", "inf", "-inf", "nan", "inf"), strict=False)):
        for part in (slice(value_dim), slice(value_dim, None)):
            batch = harness.load(forward, seed=number)
            _fill_unseen(harness, forward, part, float(bad))
            what = f"with {bad} in elements {part.start or 0} to {part.stop or 'the last'} of unseen rows the output"
            harness.assert_forward(forward, batch, what)
            torch.nan_to_num_(harness.tensors.q)


def _fill_unseen(harness: Harness, forward: ForwardCase, part: slice, value: float) -> None:
    """Fill this part of every row that no live row sees or stores, except null pages, and 1 into its other part."""
    import torch

    from ..harness.tensors import used_slots

    tensors, value_dim = harness.tensors, harness.geometry.attention.value_width
    page = forward.geometry.attention.page_size
    kept = [*range(forward.null_pages * page), *used_slots(forward)]
    unseen = torch.ones(tensors.num_pages * page, dtype=torch.bool, device=tensors.q.device)
    unseen[torch.tensor(kept, device=unseen.device)] = False
    for name, pool in tensors.stored.items():
        fill = torch.ones(pool.shape[-1], dtype=pool.dtype, device=pool.device)
        if name == "rows":
            fill[part] = value
        elif (name == "value_part") == (part.stop == value_dim):
            fill[:] = value
        pool[unseen.view(pool.shape[:2])] = fill


@behaviour(Fixture.FORWARDS, cases=cases.one_row, since=SINCE, bugs=("vllm#44492", "vllm#45227", "sglang#11012"))
def one_row_is_a_chain(harness: Harness, forwards: list[ForwardCase]) -> None:
    """One row per request gives the same result as a decode, as a chain, as a tree, and as a prompt of one token."""
    order = [*forwards, *forwards[::-1]]
    for forward in order:
        assert_forward(harness, forward, Contents.USUAL)


@behaviour(Fixture.FORWARDS, cases=cases.padded, since=SINCE, bugs=("vllm#35969", "vllm#54179", "vllm-ascend#2951"))
def padding_may_be_most(harness: Harness, forwards: list[ForwardCase]) -> None:
    """A batch of 18 requests is right when one is live, with a prefix of no token or of one."""
    for number, forward in enumerate(forwards):
        harness.arena.poison()
        harness.assert_forward(forward, harness.load(forward, seed=number))


@behaviour(Fixture.FORWARDS, cases=cases.blocks, since=SINCE, bugs=("vllm#41662", "vllm#57085"))
def blocks_see_themselves(harness: Harness, forwards: list[ForwardCase]) -> None:
    """Each row of a draft block attends to its prefix and to the whole block, on both sides of a page boundary."""
    for forward in forwards:
        assert_forward(harness, forward, Contents.USUAL, Contents.NEEDLES)


@behaviour(Fixture.FORWARDS, cases=_forwards, since=SINCE, bugs=("flashinfer#1341",))
def queries_may_be_strided(harness: Harness, forwards: list[ForwardCase]) -> None:
    """Queries may be views with any pitch of rows and heads, and new rows may be views of a projection."""
    for number, forward in enumerate(forwards):
        _set_strides(harness, number)
        harness.assert_forward(forward, harness.load(forward, seed=number), "with strided q and k the output")


def _set_strides(harness: Harness, number: int) -> None:
    """Make q and k views of new memory: heads before rows, heads further apart, or rows further apart."""
    tensors = harness.tensors
    (rows, heads, dim), gap = tensors.q.shape, 32 * (1 + number)

    def views() -> list[torch.Tensor]:
        nan = float("nan")
        if number % 3 == 0:
            return [tensors.q.new_full((heads, rows, dim), nan).transpose(0, 1)]
        if number % 3 == 1:
            return [tensors.q.new_full((rows, heads, dim + gap), nan)[..., :dim]]
        return [tensors.q.new_full((rows, heads + 3, dim), nan)[:, :heads]]

    tensors.q = views()[0]
    tensors.k = tensors.k.new_full((rows, 1, dim + 192 + gap), float("nan"))[..., 192 : 192 + dim]


@behaviour(Fixture.FORWARDS, cases=cases.engine_stores, since=SINCE)
def engine_may_store(harness: Harness, forwards: list[ForwardCase]) -> None:
    """With Form.ENGINE_STORES the engine has stored the rows: the backend reads them and writes no KV."""
    for number, forward in enumerate(forwards):
        batch = harness.load(forward, seed=number)
        watch = harness.watch(forward, batch)
        harness.assert_forward(forward, batch, "with rows that the engine stored the output")
        watch.assert_unchanged_except(("out",), "a forward")


@behaviour(Fixture.SUBJECT, cases=cases.special, since=SINCE)
def features_are_served_or_refused(subject: BackendUnderTest, special: Special) -> None:
    """A backend that serves latent layers serves a window, cap, sinks, 8 bits or another width too, or names it.

    A reason of its refusal contains the feature's name or the width. A served feature gives right outputs.
    """
    subject.require(cases.geometry_of(cases.ATTENTIONS["h16-page64"], cases.MODES["plain"]))
    assert_served_or_named(subject, special, "a latent layer is")


@behaviour(Fixture.LAYERS, cases=cases.pairs, since=SINCE, bugs=("tokenspeed#958", "sglang#23490"))
def pairs_share_their_pages(layers: LayerHarness, forwards: list[ForwardCase]) -> None:
    """A latent target and a draft head are right on the same page ids, table and lengths, in any order of layers."""
    for number, forward in enumerate(forwards):
        batch, expected = layers.load(forward, seed=number)
        layers.plan(batch)
        layers.step(forward, batch)
        layers.assert_layers(forward, batch, expected, f"in forward {number}")


@behaviour(Fixture.LARGE_POOL, cases=cases.far, since=SINCE, bugs=("vllm#47671", "flashinfer#3136"))
def rows_may_lie_past_int32(harness: Harness, forward: ForwardCase) -> None:
    """Rows are stored and read where slot · head_dim does not fit 32 bits."""
    harness.run(forward, harness.load(forward))
    harness.assert_sparse_pool(forward)


@behaviour(Fixture.FORWARD, cases=sizes.crowds, since=SINCE, bugs=("flashinfer#5170", "vllm#24966"))
def a_crowd_is_right(harness: Harness, forward: ForwardCase) -> None:
    """A batch of 24 requests, the longest with over 2,048 keys, is right in every mode for each layout of rows.

    Heads, pages and widths of rows are those of models, and sizes between them.
    """
    assert_forward(harness, forward, Contents.WEIGHED)


@behaviour(Fixture.FORWARD, cases=sizes.together, since=SINCE)
def profiles_are_right_together(harness: Harness, forward: ForwardCase) -> None:
    """Outputs are right when latent rows meet wide tails, overlap and forms of the engine; each two meet."""
    assert_forward(harness, forward, Contents.USUAL)


@on_device_only(Fixture.FORWARD, cases=sizes.full_size, since=SINCE, bugs=("flashinfer#5170",))
def full_size_is_right_on_device(harness: Harness, forward: ForwardCase) -> None:
    """Outputs are right on the device for 33 requests of up to 8,192 tokens in the head counts of models."""
    assert_forward(harness, forward, Contents.WEIGHED, Contents.NEEDLES)
