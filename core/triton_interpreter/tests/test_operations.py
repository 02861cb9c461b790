"""Recorded interpreter operations give bitwise the results of Triton's interpreter when repeated with other values."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from draftmark_triton_interpreter.operands import Operands
from draftmark_triton_interpreter.patches import speed_up_interpreter
from draftmark_triton_interpreter.programs import InterpretedKernel

SIZE = 16


def products(x, y, out, BLOCK: tl.constexpr):
    """Run operations with one tensor as both operands, and with two tensors of one type."""
    cell = tl.arange(0, BLOCK)
    a, b = tl.load(x + cell), tl.load(y + cell)
    tl.store(out + cell, a * a)
    tl.store(out + BLOCK + cell, a * b)
    tl.store(out + 2 * BLOCK + cell, b - b)
    tl.store(out + 3 * BLOCK + cell, (a > b) & (b > a))


def counts(x, out, BLOCK: tl.constexpr):
    """Run atomic additions with unused results, and store the program id."""
    tl.atomic_add(out + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, BLOCK)))
    tl.store(out + BLOCK + tl.program_id(0), tl.program_id(0) + tl.num_programs(0))


def reductions(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store sums, minima and maxima along both axes, and of a vector."""
    row, col = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    block = tl.load(x + row[:, None] * COLUMNS + col[None, :])
    tl.store(out + row, tl.reduce(block, 1, tl.standard._elementwise_max))
    tl.store(out + 16 + col, tl.reduce(block, 0, tl.standard._elementwise_min))
    total = tl.reduce(block, 1, tl.standard._sum_combine)
    tl.store(out + 32 + row, total)
    tl.store(out + 48, tl.reduce(total, 0, tl.standard._sum_combine))
    tl.store(out + 49, tl.reduce(tl.load(x + col), 0, tl.standard._elementwise_max))


def conversions(x, out, BLOCK: tl.constexpr):
    """Store signed shifts, split and joined halves, casts and a matrix product."""
    cell = tl.arange(0, BLOCK)
    value = tl.load(x + cell)
    tl.store(out + cell, (value.to(tl.float32, bitcast=True).to(tl.bfloat16).to(tl.float32)).to(tl.int32, bitcast=True))
    tl.store(out + BLOCK + cell, (value >> 3) + (value // 7) * (value % 5))
    low, high = tl.split(tl.join(value, value + 1))
    tl.store(out + 2 * BLOCK + cell, tl.where(low < 0, high, ~low).to(tl.int64).to(tl.int32))
    square = tl.broadcast_to((value % 3).to(tl.float32)[:, None], (BLOCK, BLOCK))
    product = tl.dot(square, tl.trans(square), input_precision="ieee")
    tl.store(out + 3 * BLOCK + cell, tl.reduce(product, 1, tl.standard._sum_combine).to(tl.int32))


def masked(x, pages, out, BLOCK: tl.constexpr):
    """Load and store with masked lanes that have invalid pointers."""
    cell = tl.arange(0, BLOCK)
    page = tl.load(pages + cell)
    live = page >= 0
    value = tl.load(x + page.to(tl.int64) * (1 << 40), mask=live, other=7)
    tl.store(out + cell + (1 - live.to(tl.int64)) * (1 << 40), value, mask=live)


def boxes(source, out, rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store boxes of a descriptor at several rows: inside the tensor, across its last row, and before its first."""
    row, col = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    cell = row[:, None] * COLUMNS + col[None, :]
    for number in range(4):
        box = source.load([tl.load(rows + number), COLUMNS])
        tl.store(out + number * ROWS * COLUMNS + cell, box)
    tl.store(out + 4 * ROWS * COLUMNS + cell, source.load([1, 0]) + source.load([2, tl.load(rows + 3) * 0]))


def integers(seed: int, *shape: int) -> torch.Tensor:
    """Return random int32 values."""
    return torch.randint(-(2**31), 2**31 - 1, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def both(function, grid: int, size: int, *inputs: torch.Tensor, **constants: int) -> None:
    """Launch a kernel twice with different inputs, and compare each launch with Triton's own launch."""
    light, own = InterpretedKernel(InterpretedFunction(function)), InterpretedFunction(function)
    for turn in range(2):
        given = [one.roll(turn) for one in inputs]
        outputs = []
        for kernel in (own, light):
            out = torch.full((size,), -5, dtype=inputs[0].dtype)
            kernel[(grid,)](*given, out, **constants)
            outputs.append(out)
        expected, got = (out.view(torch.uint8) for out in outputs)
        assert torch.equal(got, expected), (turn, *outputs)


def test_same_tensor_as_both_operands():
    """An operation recorded with one tensor as both operands gives right results for two different tensors."""
    both(products, 1, 4 * SIZE, integers(1, SIZE), integers(2, SIZE), BLOCK=SIZE)


def test_memory_operations_run_in_every_program():
    """Each atomic addition runs once in each program, and each program has its own id."""
    both(counts, 3, SIZE + 3, integers(3, SIZE), BLOCK=SIZE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.int64])
def test_reductions_match_the_interpreter(dtype):
    """Sums add in the interpreter's order, and minima and maxima ignore NaN, as in the interpreter."""
    values = integers(4, 4, 8) // 2**8 if not dtype.is_floating_point else integers(4, 4, 8).float() / 2**28
    values = values.to(dtype)
    if dtype.is_floating_point:
        values[1, 2] = values[2] = torch.nan
        values[3, 0] = torch.inf
    both(reductions, 1, 50, values, ROWS=4, COLUMNS=8)


def test_unrecordable_operations_run_unchanged():
    """Operations that cannot be recorded (several results, shifts, casts) give right results among recorded ones."""
    both(conversions, 1, 4 * SIZE, integers(5, SIZE), BLOCK=SIZE)


def test_masked_lanes_are_not_touched():
    """The pointer of a masked lane is never dereferenced, in the first launch or in repeated ones."""
    pages = torch.tensor([0, -1, -3, 0, -1, 0, -(2**20), 0] * 2, dtype=torch.int32)
    both(masked, 1, SIZE, torch.tensor([42], dtype=torch.int32), pages, BLOCK=SIZE)


def test_types_are_resolved_once(monkeypatch):
    """The second launch of a kernel does not call Triton's type resolution."""
    kernel = InterpretedKernel(InterpretedFunction(products))
    x, y, out = integers(6, SIZE), integers(7, SIZE), torch.zeros(4 * SIZE, dtype=torch.int32)
    kernel[(1,)](x, y, out, BLOCK=SIZE)
    monkeypatch.delattr(Operands, "binary_op_type_checking_impl")
    monkeypatch.setattr("triton.language.semantic.TritonSemantic.binary_op_type_checking_impl", None)
    kernel[(1,)](y, x, out, BLOCK=SIZE)
    assert torch.equal(out[:SIZE], y * y)


@pytest.mark.parametrize("target", [tl.float16, tl.float32, tl.bfloat16])
def test_fp8_upcast_matches_triton(target):
    """All 256 values of e4m3 convert bitwise as in the interpreter's own conversion."""
    speed_up_interpreter()
    quick = interpreter._convert_float
    general = dict(zip(quick.__code__.co_freevars, quick.__closure__, strict=True))["convert"].cell_contents
    codes = torch.arange(256).to(torch.uint8).reshape(16, 16).numpy()
    got, expected = (convert(codes, tl.float8e4nv, target, None) for convert in (quick, general))
    assert got.dtype == expected.dtype and (got == expected).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_boxes_of_a_descriptor_match_the_interpreter(dtype):
    """A box holds the tensor's cells, and zeros outside of it, also if the tensor's rows are not contiguous."""
    source = (integers(9, 12, 96) % 60).to(dtype)[:, :48]
    rows = torch.tensor([0, 3, 10, -2], dtype=torch.int32)
    outputs = []
    for build in (lambda kernel: kernel, InterpretedKernel):
        out = torch.full((5 * 4 * 16,), 77, dtype=dtype)
        build(InterpretedFunction(boxes))[(1,)](
            TensorDescriptor(source, list(source.shape), list(source.stride()), [4, 16]), out, rows, 4, 16
        )
        outputs.append(out)
    assert torch.equal(*outputs)
    assert not outputs[1].view(5, 4, 16)[2, 2:].any()


def test_later_boxes_are_copied(monkeypatch):
    """Only the first box of a shape, and boxes with cells outside the tensor, are loaded by pointers."""
    pointers = []
    real = interpreter.TensorDescHandle.materialize_pointers
    monkeypatch.setattr(
        interpreter.TensorDescHandle, "materialize_pointers", lambda *args: pointers.append(args) or real(*args)
    )
    source, out = torch.randn(12, 32), torch.empty(5 * 4 * 16)
    kernel = InterpretedKernel(InterpretedFunction(boxes))
    whole = TensorDescriptor(source, list(source.shape), list(source.stride()), [4, 16])
    kernel[(1,)](whole, out, torch.tensor([0, 3, 8, 1], dtype=torch.int32), 4, 16)
    before = len(pointers)
    for rows, loads in (([5, 6, 7, 8], 0), ([5, 10, 0, -1], 2)):
        kernel[(1,)](whole, out, torch.tensor(rows, dtype=torch.int32), 4, 16)
        assert len(pointers) - before == loads
        before = len(pointers)
