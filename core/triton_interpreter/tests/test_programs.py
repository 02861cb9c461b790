"""The fast launch of interpreted programs equals Triton's own launch bitwise, and then restores the language."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction

from draftmark_triton_interpreter import programs
from draftmark_triton_interpreter.programs import InterpretedKernel, use_fast_launch

ROWS, COLUMNS = 4, 8


def mixed(x, y, out, counts, length, factor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Combine operands of different types and shapes; each program processes one page of the inputs."""
    page = tl.program_id(0).to(tl.int64) * (BLOCK_M * BLOCK_N)
    row, col = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    cells = page + row[:, None] * BLOCK_N + col[None, :]
    live = (col < length)[None, :] & (row >= 0)[:, None]
    a = tl.load(x + cells, mask=live, other=-1.5)
    b = tl.load(y + cells, mask=live, other=3)
    scaled = a * factor - (a.to(tl.float32) / (b * b + 1)) + (-0.0)
    remainder = (b % 5) // 2 + (b << 1) - (b & 3)
    picked = tl.where(scaled > row[:, None], tl.maximum(scaled, 0.0), tl.minimum(col[None, :] * 1.0, scaled))
    tl.store(out + cells, picked + remainder, mask=live)
    tl.store(counts + page + row, tl.reduce((live & (b != 2)).to(tl.int32), 1, tl.standard._sum_combine))


def signs(out, factor):
    """Store zeros of both signs, from constants that compare equal but differ."""
    one = tl.load(out) * 0.0
    tl.store(out + 1, one + 0.0)
    tl.store(out + 2, one - 0.0 + (-0.0))
    tl.store(out + 3, (factor * -0.0) + (-0.0))
    tl.store(out + 4, (factor * 0.0) + 0.0)


def unbounded(out):
    """Store log2 and exp2 results that are infinite; a GPU stores infinities too."""
    none = tl.load(out) * 0.0
    tl.store(out + 1, tl.log2(none))
    tl.store(out + 2, tl.exp2(none + 500.0))


def broken(out):
    """Fail while the program runs, because tl.arange needs a power of two and gets 3."""
    tl.store(out + tl.arange(0, 3), 0.0)


def run(kernel, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of `mixed` over three pages of poisoned outputs."""
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(3, ROWS, COLUMNS, generator=draw).to(torch.float16)
    y = torch.randint(-9, 9, x.shape, generator=draw, dtype=torch.int16)
    out, counts = torch.full(x.shape, torch.nan), torch.full(x.shape, -1)
    kernel[(3,)](x, y, out, counts, length, 0.1, BLOCK_M=ROWS, BLOCK_N=COLUMNS, num_warps=4)
    return out, counts


@pytest.mark.parametrize("length", [0, 5, COLUMNS])
def test_fast_launch_is_bitwise_equal_to_tritons(length):
    """Operands of different types and shapes give bitwise equal results, in the first launch and in repeated ones."""
    kernel = InterpretedFunction(mixed)
    expected = run(kernel, length)
    for _ in range(2):
        for got, wanted in zip(run(InterpretedKernel(kernel), length), expected, strict=True):
            assert torch.equal(got.view(torch.int32), wanted.view(torch.int32)), (got, wanted)


def test_equal_numbers_of_different_types_are_distinct():
    """0.0 and -0.0 keep their signs, as in Triton's own launch."""
    outputs = []
    for launched in (InterpretedFunction(signs), InterpretedKernel(InterpretedFunction(signs))):
        out = torch.tensor([-1.0, 9.0, 9.0, 9.0, 9.0])
        launched[(1,)](out, 1.0)
        outputs.append(out)
    assert torch.equal(*(out.view(torch.int32) for out in outputs)), outputs


def test_language_is_restored_after_a_launch():
    """The language's functions are restored after a launch, also after a program that failed."""
    before = (tl.load, tl.arange, tl.tensor.__add__, tl.reduce, tl.range)
    run(InterpretedKernel(InterpretedFunction(mixed)), COLUMNS)
    with pytest.raises(InterpreterError, match="power of 2"):
        InterpretedKernel(InterpretedFunction(broken))[(1,)](torch.zeros(4))
    assert before == (tl.load, tl.arange, tl.tensor.__add__, tl.reduce, tl.range)


def test_triton_launch_is_kept_when_private_names_are_gone(monkeypatch):
    """If a private name of the interpreter is missing, kernels keep Triton's own launch."""
    monkeypatch.delattr("triton.runtime.interpreter._implicit_cvt")
    kernel = InterpretedFunction(mixed)
    module = SimpleNamespace(mixed=kernel)
    use_fast_launch(module)
    assert module.mixed is kernel


@pytest.mark.filterwarnings("error")
def test_infinities_raise_no_warning():
    """log2(0) and an overflowing exp2 give infinities, as on a GPU, without a warning."""
    out = torch.zeros(3)
    for _ in range(3):
        InterpretedKernel(InterpretedFunction(unbounded))[(1,)](out)
    assert out.tolist() == [0.0, float("-inf"), float("inf")]


def outcome(convert, value):
    """Return a converted argument, or the text of the error; Triton 3.7 raises one for a bool."""
    try:
        return convert(value)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    "value",
    [
        *(0, 1, -1, 2**31 - 1, -(2**31), 2**31, 2**40, True, 0.5, None),
        *(torch.zeros(3, dtype=dtype) for dtype in (torch.int32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)),
    ],
)
def test_argument_is_converted_as_triton_converts_it(value):
    """An argument of every kind has the type and the word that Triton's interpreter gives it, also when it is known."""
    for _ in range(2):
        made, wanted = outcome(programs._operand, value), outcome(interpreter._implicit_cvt, value)
        assert type(made) is type(wanted)
        if isinstance(wanted, tl.tensor):
            one, other = made.handle, wanted.handle
            assert vars(made).keys() == vars(wanted).keys() and (made.type, made.dtype) == (wanted.type, wanted.dtype)
            assert (one.data, one.data.dtype, one.dtype) == (other.data, other.data.dtype, other.dtype)
            assert made.shape == wanted.shape and made.numel.value == wanted.numel.value
        else:
            assert made == wanted
