"""Checks of outputs against float64, over dtypes, head shapes, head sizes, windows and soft caps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from draftmark.geometry import DRAFT_MODES, Geometry, Mode

from ..behaviour import Fixture, behaviour
from ..cases.contents import Contents
from ..cases.forward_sets import extends, programs
from ..cases.forwards import ForwardCase, ragged, uniform
from ..cases.geometries import Shape, logits, mandatory, numerics
from ..cases.production import few_requests
from ..check import Case
from ..oracle.formulas import draft_steps
from ..profiles import FP8_DTYPE
from ..sizing.geometries import odd_geometries, odd_trees

if TYPE_CHECKING:
    from ..harness.harness import Harness

HIGH_OFFSET = 2**31
"""Flat element offsets from this number on do not fit int32."""


def _cases() -> list[Case]:
    found = []
    for shape in (Shape("mandatory", mandatory()), *numerics()):
        geometry = shape.geometry
        lens = (0, 1, 37) if shape.since < (1, 2) else (0, 129, 250)
        forwards = [uniform("decode", geometry, Mode.DECODE, lens, 4), *extends(geometry)[1:2]]
        if Mode.VERIFY in geometry.modes:
            forwards.append(uniform("verify", geometry, Mode.VERIFY, lens, 4))
        found += [shape.case(forward, forward.name) for forward in forwards]
    return found


@behaviour(Fixture.FORWARD, cases=_cases, bugs=("vllm#43961", "ROCm/ATOM#1591", "sglang#32062"))
def match_float64(harness: Harness, forward: ForwardCase) -> None:
    """Every live output row matches float64 within rounding, and padded rows are finite.

    All unused KV contains NaN.
    """
    for contents in (Contents.FLAT, Contents.SPREAD):
        harness.assert_forward(forward, harness.load(forward, contents=contents))


def _odd() -> list[Case]:
    """Return one forward per mode for every geometry that a backend is allowed to refuse."""
    found = []
    for case in (*odd_geometries(), *odd_trees()):
        geometry: Geometry = case.value
        if geometry.limits.overlap or (Mode.DECODE in geometry.modes and Mode.VERIFY not in geometry.modes):
            continue
        size = geometry.attention.page_size
        lens = (min(size + 1, 290), 0)
        last = max(0, draft_steps(geometry) - 1)
        kinds = [(mode, last if mode is Mode.DRAFT else 0) for mode, _ in programs(geometry)]
        forwards = [
            uniform(f"{mode.value}{step or ''}", geometry, mode, lens, 3, step=step)
            for mode, step in sorted(set(kinds), key=str)
        ]
        forwards.append(ragged("extend", geometry, (3, 0), (2, 5), padded=1))
        if case.since >= (1, 2) and Mode.VERIFY in geometry.modes:
            forwards.append(uniform("verify-deep", geometry, Mode.VERIFY, lens, 3, tree="deep"))
        found.append(replace(case, value=forwards))
    return found


@behaviour(Fixture.FORWARDS, cases=_odd, bugs=("sglang#15664", "sglang#32062", "TRT-LLM#13081"))
def serve_what_is_not_refused(harness: Harness, forwards: list[ForwardCase]) -> None:
    """The backend gives right outputs for every geometry that supports() accepts.

    The cases vary head counts, head sizes, dtypes, page sizes, windows and draft shapes.
    """
    for forward in forwards:
        harness.assert_forward(forward, harness.load(forward))


def _logits() -> list[Case]:
    return [
        shape.case(forward, forward.name) for shape in logits() for forward in few_requests(shape.geometry, (40, 133))
    ]


@behaviour(Fixture.FORWARD, cases=_logits, since=(1, 3), bugs=("vllm#56579", "flashinfer#4267", "flashinfer#4401"))
def survive_any_logits(harness: Harness, forward: ForwardCase) -> None:
    """Outputs are right for logits of a few, of hundreds and of 1e5, of both signs, in every mode.

    Some rows have nearly constant logits, and some have almost all weight on one key.
    """
    for one in (Contents.SPREAD, Contents.LARGE, Contents.NEEDLES, Contents.LEVELS):
        harness.assert_forward(forward, harness.load(forward, contents=one), f"with {one} contents the output")


def _scaled() -> list[Case]:
    few = (Mode.DECODE, Mode.VERIFY, Mode.EXTEND)
    return [
        shape.case([one for one in few_requests(shape.geometry, (40, 133)) if one.mode in few])
        for shape in logits()
        if shape.geometry.attention.kv_dtype == FP8_DTYPE
    ]


@behaviour(Fixture.FORWARDS, cases=_scaled, since=(1, 3))
def each_scale_counts_alone(harness: Harness, forwards: list[ForwardCase]) -> None:
    """k_scale and v_scale are independent: either or both may be None, which means a scale of 1."""
    whole = harness.tensors.cache
    for forward in forwards:
        for k_scale, v_scale in ((whole.k_scale, None), (None, whole.v_scale), (None, None)):
            harness.tensors.cache = replace(whole, k_scale=k_scale, v_scale=v_scale)
            there = [name for name, one in (("k_scale", k_scale), ("v_scale", v_scale)) if one is not None]
            what = f"with {'only ' + there[0] if there else 'no scale'} the output"
            harness.assert_forward(forward, harness.load(forward, contents=Contents.SPREAD), what)


def _high() -> list[Case]:
    """Return forwards on pages more than 2**31 elements into the pool: 4.3 GB per tensor, mostly never touched."""
    found = []
    for shape in (one for one in numerics() if one.name in ("bf16-gqa4-128", "bf16-gqa4-128-page128")):
        a = shape.geometry.attention
        first = HIGH_OFFSET // (a.page_size * a.num_kv_heads * a.head_dim) + 3
        drafting = replace(shape.geometry, modes=(Mode.DECODE, *DRAFT_MODES))
        forwards = [
            (uniform("verify", shape.geometry, Mode.VERIFY, (17, 1), 4, first_page=first), shape.since),
            *((one, shape.since) for one in extends(shape.geometry, first_page=first)[1:2]),
            *(
                (uniform(mode.value, drafting, mode, (17, 1), 4, step=step, first_page=first), (1, 3))
                for mode, step in dict(programs(drafting)).items()
            ),
        ]
        suffix = "-page128" * (a.page_size == 128)
        found += [Case(f"{forward.name}{suffix}", forward, since) for forward, since in forwards]
    return found


@behaviour(Fixture.LARGE_POOL, cases=_high, bugs=("vllm#47671", "flashinfer#3136", "vllm#50427"))
def reach_past_int32(harness: Harness, forward: ForwardCase) -> None:
    """Rows are stored and read where the flat element offset in the cache does not fit 32 bits."""
    harness.run(forward, harness.load(forward))
    harness.assert_sparse_pool(forward)
