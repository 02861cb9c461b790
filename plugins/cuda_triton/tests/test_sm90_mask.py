"""Tests of the Hopper mask: its Gluon source and PTX run here over NumPy, because Gluon has no interpreter."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest

try:
    from draftmark_cuda_triton import kernels_sm90
except (ImportError, AttributeError):
    pytest.skip("this Triton has no Gluon as `kernels_sm90` uses it", allow_module_level=True)

ROWS, THREADS = 64, 128
CAUSAL, TREE, BLOCK = 0, 1, 2
COMPARE = {"lt": np.less, "gt": np.greater, "eq": np.equal, "ne": np.not_equal}


def signed(x):
    """Return the value of 32 bits as a signed integer."""
    return ((np.asarray(x, np.int64) + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


def unsigned(x):
    """Return the value of 32 bits as an unsigned integer."""
    return np.asarray(x, np.int64) & 0xFFFFFFFF


@dataclass
class Group:
    """Runs a few lines of PTX as one warp group; each warp can branch differently.

    Attributes:
        registers: register name → its values, ``[threads]``.
        threads: threads of the group.
        waiting: label → the threads that have branched to it, bool ``[threads]``.
    """

    registers: dict
    threads: int = THREADS
    waiting: dict = field(default_factory=dict)

    def value(self, name):
        """Return the values of a register, or a constant in every thread."""
        if name in self.registers:
            return self.registers[name]
        if name == "%laneid":
            return np.arange(self.threads) % 32
        if name == "0fFF800000":
            return -np.inf
        return np.full(self.threads, int(name, 0))

    def run(self, code):
        """Run every line of the PTX."""
        active = np.ones(self.threads, bool)
        for line in (one.strip() for one in re.split(r"[;\n{}]", code)):
            if line.endswith(":"):
                active = active | self.waiting.pop(line[:-1], False)
            elif branch := re.fullmatch(r"@(!?)(\w+) bra.uni (\w+)", line):
                inverted, flag, label = branch.groups()
                leaves = active & (self.registers[flag] != bool(inverted))
                assert all(len(set(warp)) == 1 for warp in leaves.reshape(-1, 32)), "a warp branches as one"
                self.waiting[label] = leaves
                active = active & ~leaves
            elif line and not line.startswith(".reg"):
                operation, operands = line.split(" ", 1)
                target, *sources = (one.strip() for one in operands.split(","))
                result = self.result(operation, *sources)
                before = self.registers.get(target, np.zeros(self.threads, np.asarray(result).dtype))
                self.registers[target] = np.where(active, result, before)
        assert not self.waiting, "every label stands after its branches"

    def result(self, operation, *operands):
        """Return the result of one instruction."""
        name, *how = operation.split(".")
        a, *rest = (self.value(one) for one in operands)
        match name:
            case "mov":
                return a
            case "and":
                return signed(a & rest[0])
            case "sub":
                return signed(a - rest[0])
            case "max":
                return np.maximum(a, rest[0])
            case "shl":
                return signed(np.where(unsigned(rest[0]) > 31, 0, unsigned(a) << (unsigned(rest[0]) & 31)))
            case "shr":
                return signed(np.where(unsigned(rest[0]) > 31, 0, unsigned(a) >> (unsigned(rest[0]) & 31)))
            case "shf":
                assert how == ["r", "wrap", "b32"]
                return signed((unsigned(rest[0]) << 32 | unsigned(a)) >> (unsigned(rest[1]) & 31))
            case "bmsk":
                at, width = np.minimum(unsigned(a), 32), np.minimum(unsigned(rest[0]), 32)
                return signed((1 << np.minimum(at + width, 32)) - (1 << at))
            case "selp":
                return np.where(rest[1], a, rest[0])
            case "vote":
                assert how == ["sync", "any", "pred"]
                return np.repeat(a.reshape(-1, 32).any(1), 32)
            case "setp":
                view = unsigned if how[-1] == "u32" else signed
                found = COMPARE[how[0]](view(a), view(rest[0]))
                return found | rest[1] if "or" in how else found
        raise AssertionError(operation)


def elements(block_n):
    """Return row and column of each score of each thread in wgmma's layout, ``[scores, threads]`` each."""
    lane, warp = np.arange(THREADS) % 32, np.arange(THREADS) // 32
    number = np.arange(block_n // 2)[:, None]
    return 16 * warp + lane // 4 + 8 * (number // 2 % 2), 8 * (number // 4) + 2 * (lane % 4) + number % 2


def run_instructions(code, constraints, args, dtype, is_pure, pack):
    """Run `inline_asm_elementwise` for single values (pack = 1), or for all scores of a thread at once."""
    assert len(constraints.split(",")) == (1 + len(args)) * pack
    if pack == 1:
        values = np.broadcast_arrays(*args)
        group = Group({f"${i + 1}": one.ravel() for i, one in enumerate(values)}, values[0].size)
        group.run(code)
        return group.registers["$0"].reshape(values[0].shape)
    row, column = elements(args[0].shape[1])
    flat = [np.broadcast_to(np.asarray(one), args[0].shape)[row, column] for one in args]
    group = Group({f"${pack * (1 + k) + i}": one[i] for k, one in enumerate(flat) for i in range(pack)})
    group.run(code)
    out = np.empty(args[0].shape)
    out[row, column] = np.stack([group.registers[f"${i}"] for i in range(pack)])
    return out


class Words:
    """Models pointers to mask words, one for each row.

    Attributes:
        words: all words.
        at: index of the word that each pointer points to; any value where a read is masked out.
    """

    def __init__(self, words, at):
        self.words, self.at = words, at

    def __add__(self, offset):
        return Words(self.words, self.at + offset)

    def read(self, mask, other):
        """Return the words, or `other` where the mask is False; a read out of range fails."""
        assert (self.at[mask] >= 0).all()
        assert (self.at[mask] < self.words.size).all()
        return np.where(mask, self.words[np.where(mask, self.at, 0)], other)


def source(name, **more):
    """Return a function of `kernels_sm90.mask` that runs over NumPy; `more` are global names in place of Gluon's."""
    mask = kernels_sm90.mask
    language = SimpleNamespace(
        where=np.where, minimum=np.minimum, maximum=np.maximum,
        load=lambda pointer, mask, other: pointer.read(mask & np.ones((pointer.at + mask).shape, bool), other),
        SliceLayout=lambda *_: None, arange=lambda begin, end, _: np.arange(begin, end),
        static_range=range, inline_asm_elementwise=run_instructions, float32=None, int32=None,
    )  # fmt: skip
    plain = {one: getattr(mask, one).fn for one in ("mask_by_words_asm", "mask_by_bounds_asm", "mask_constraints")}
    known = {"gl": language, "TREE": TREE, "CAUSAL": CAUSAL, "scores_layout": lambda _: None, **plain, **more}
    return FunctionType(getattr(mask, name).fn.__code__, known)


def hide(scores, tile, view, constants):
    """Return the scores after `kernels_sm90.mask.apply_mask`."""
    small = {
        name: source(name)
        for name in (
            "low_bits",
            "funnel_shift",
            "shift_past_hole",
            "last_box",
            "first_tail_slot",
            "first_tile_in_window",
        )
    }
    for name in (
        "key_positions",
        "mask_by_depth",
        "needs_mask",
        "load_mask_words",
        "visible_words",
        "seen_keys",
        "hide_unseen",
        "hide_by_depth",
    ):
        small[name] = source(name, **small)
    return source("apply_mask", **small)(scores, tile, view, constants)


@pytest.mark.parametrize(
    ("tail", "windowed"),
    [(CAUSAL, False), (CAUSAL, True), (TREE, False), (TREE, True), (BLOCK, False), (BLOCK, True)],
)
@pytest.mark.parametrize(
    ("block_n", "box"), [(64, 8), (64, 16), (64, 32), (64, 64), (128, 8), (128, 16), (128, 32), (128, 64), (128, 128)]
)
def test_apply_mask_hides_exactly_the_invisible_keys(block_n, box, tail, windowed):
    """Scores become -inf exactly where a row does not see the key, also if the last TMA box is not full."""
    # Tiles are drawn before the tail (the new tokens), at its start and at its end. Some trees are deeper than the
    # window is wide.
    constants = SimpleNamespace(BLOCK_N=block_n, BOX_KEYS=box, TAIL_KIND=tail, WINDOW=windowed)
    chance = np.random.default_rng(1000 * block_n + 10 * box + tail)
    for _ in range(25):
        group, rows = int(chance.integers(1, 9)), int(chance.integers(1, 60))
        slots = rows + int(chance.integers(0, 3)) * int(chance.integers(0, 40))
        prefix_len = int(chance.choice([0, 1, 31, block_n, int(chance.integers(0, 5 * block_n))]))
        kv_len, window = prefix_len + slots, int(chance.integers(0, 2 * block_n))
        row = (int(chance.integers(0, 3)) * ROWS + np.arange(ROWS)) // group
        live, slot_of_row = row < rows, slots - rows + row
        mask_words = (slots + 31) // 32 + int(chance.integers(0, 2))
        words = chance.integers(-(1 << 31), 1 << 31, (rows, mask_words))
        row_words = Words(words.ravel(), np.where(live, row, 0) * mask_words)
        last_tile = (kv_len + block_n - 1) // block_n - 1
        tile = int(chance.choice([last_tile, max(0, prefix_len // block_n), int(chance.integers(0, last_tile + 1))]))
        scores = chance.standard_normal((ROWS, block_n))
        depth = chance.integers(0, slots + int(chance.integers(0, 3)) * window, slots)
        own = depth[np.clip(slot_of_row, 0, slots - 1)] if tail == TREE else slot_of_row
        row_position = np.where(live, prefix_len + own, 0)
        view = kernels_sm90.mask.RowMask(
            prefix_len=prefix_len, tail_len=slots, slot_of_row=slot_of_row, row_position=row_position, row_live=live,
            row_words=row_words, depths=Words(depth, np.array(0)), mask_words=mask_words, window_left=window,
            max_position=row_position.max(), first_masked_tile=prefix_len // block_n,
        )  # fmt: skip
        got = hide(scores, tile, view, constants)
        start = tile * block_n + np.arange(block_n) // box * box
        position = start + np.arange(block_n) % box - box + np.minimum(kv_len - start, box)
        slot = position - prefix_len
        seen = np.broadcast_to(position >= start, scores.shape).copy()
        if tail == CAUSAL:
            seen &= slot <= slot_of_row[:, None]
        if tail == TREE:
            at = np.clip(slot, 0, slots - 1)
            bits = words[np.where(live, row, 0)][:, at // 32] >> (at % 32) & 1
            seen &= (slot < 0) | (bits == 1)
        if windowed:
            at = prefix_len + depth[np.clip(slot, 0, slots - 1)] if tail == TREE else position
            seen &= row_position[:, None] - np.where(slot < 0, position, at) <= window
        assert np.array_equal(got[live], np.where(seen, scores, -np.inf)[live])


def test_split_packed_row_equals_division():
    """`split_packed_row` equals an integer division for every group and every row of a tile."""
    rows = kernels_sm90.pack_gqa
    reciprocal, split_packed_row = (
        FunctionType(getattr(rows, name).fn.__code__, {}) for name in ("reciprocal", "split_packed_row")
    )
    # A row tile has at most 192 packed rows, and can begin in the middle of a row's query heads, so larger indices
    # occur.
    for group in range(1, 513):
        packed = np.arange(192 + group)
        row, member = split_packed_row(packed, group, reciprocal(group))
        assert (packed * reciprocal(group)).max() < 1 << 31
        assert np.array_equal(row, packed // group)
        assert np.array_equal(member, packed % group)
