"""Recording of one step: the tape lists the calls that a replay makes, the ledger lists the storages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from draftmark import CaptureError
from draftmark.graphs.active import ACTIVE

from .host_memory import HOST_STORAGES
from .ledger import StorageLedger, storage_bytes
from .operators import is_composite, is_host_only, map_tensors, returns_nothing, tensors_in, written_operands
from .rules import MOVED, PAGEABLE_COPY, refused_call, refused_operator
from .tape import Tape

aten = torch.ops.aten


class Recorder:
    """Runs each operator of a step, so that shapes and dtypes are real, and stores the calls that a replay makes."""

    def __init__(self) -> None:
        self.tape = Tape()
        self.ledger = StorageLedger()
        self._refusal: CaptureError | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record all torch operations of this thread in the ``with`` block, then undo their effects."""
        random_state = torch.get_rng_state()
        token = ACTIVE.set(self)
        try:
            with _Operators(self), _Calls(self):
                yield
            if self._refusal is not None:
                # The step caught the CaptureError. Raise it again: on a device this capture would be invalid.
                raise self._refusal
        finally:
            ACTIVE.reset(token)
            self.ledger.restore()
            torch.set_rng_state(random_state)

    def refuse(self, sentence: str) -> CaptureError:
        """Return the error to raise, and store it in case the step catches it."""
        error = CaptureError(sentence)
        self._refusal = self._refusal or error
        return error

    def record_operator(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run `func`, and append it to the tape if a device would launch a kernel for it."""
        if func.overloadpacket is aten.lift_fresh:
            self.ledger.constant(args[0])
            return func(*args, **kwargs)
        operands = self._note_operands(func, (args, kwargs))
        # A write to a host scalar happens at capture only: a replay uses the resulting value as a constant.
        written = [t for t in written_operands(func, args, kwargs) if not self.ledger.is_constant(t)]
        for tensor in written:
            self.ledger.before_write(tensor)
        result = func(*args, **kwargs)
        if any(self.ledger.moved(tensor) for tensor in written):
            raise self.refuse(MOVED.sentence(str(func)))
        targets = self._adopt([result] if isinstance(result, Tensor) else tree_leaves(result))
        asserts = bool(operands) and returns_nothing(func)
        if not is_host_only(func) and (written or asserts or any(target is not None for target in targets)):
            # Aliases are made after the call: an out= tensor that started empty now has its final shape.
            self.tape.append(partial(func, *self._own(args), **self._own(kwargs)), targets)
        return result

    def record_call(self, fn: Callable[..., object], args: Sequence[Any], mutates: Sequence[Tensor]) -> None:
        """Run a kernel that torch does not dispatch, without recording inside, and append it as one tape entry."""
        name = f"record_call({getattr(fn, '__name__', repr(fn))})"
        token = ACTIVE.set(None)
        try:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                operands = self._note_operands(name, args)
                for tensor in mutates:
                    self._note_mutated(name, tensor, operands)
                others = [tensor for tensor in operands if not _shares_storage(tensor, mutates)]
                before = [storage_bytes(tensor).clone() for tensor in others]
                fn(*args)
                for tensor, saved in zip(others, before, strict=True):
                    self._check_unchanged(name, tensor, saved)
                self.tape.append(partial(fn, *self._own(args)), [])
        finally:
            ACTIVE.reset(token)

    def _note_operands(self, name: object, tree: Any) -> list[Tensor]:
        operands = tensors_in(tree)
        for tensor in operands:
            if tensor.untyped_storage() in HOST_STORAGES:
                raise self.refuse(PAGEABLE_COPY.sentence(f"{name} on a tensor in host memory"))
            self.ledger.read(tensor, name)
        return operands

    def _adopt(self, leaves: Sequence[Any]) -> list[Tensor | None]:
        """Return an alias of each newly allocated result tensor; None for other results, such as views."""
        fresh = [isinstance(leaf, Tensor) and not self.ledger.contains(leaf) for leaf in leaves]
        return [self.ledger.made(leaf) if is_fresh else None for leaf, is_fresh in zip(leaves, fresh, strict=True)]

    def _own(self, tree: Any) -> Any:
        return map_tensors(self.ledger.alias, tree)

    def _note_mutated(self, name: str, tensor: Tensor, operands: Sequence[Tensor]) -> None:
        if not _shares_storage(tensor, operands):
            raise self.refuse(
                f"{name} has a {tensor.dtype} tensor {list(tensor.shape)} in mutates= that is not among its "
                "arguments; pass it every tensor that the kernel touches"
            )
        self.ledger.before_write(tensor)

    def _check_unchanged(self, name: str, tensor: Tensor, before: Tensor) -> None:
        after = storage_bytes(tensor)
        if not torch.equal(after, before):
            after.copy_(before)
            raise self.refuse(
                f"{name} wrote a {tensor.dtype} tensor {list(tensor.shape)} that is not in mutates=; "
                "add that tensor to mutates="
            )


class _Operators(TorchDispatchMode):
    """Dispatch mode that records every operator that reaches torch's dispatcher."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: no code is compiled here, and dynamo's wrapper takes seconds to import and slows operators."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sentence = refused_operator(func, args, kwargs)
        if sentence is not None:
            raise self._recorder.refuse(sentence)
        if is_composite(func):
            # inference_mode dispatches a composite operator whole; run its parts here, to find an .item() inside.
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        return self._recorder.record_operator(func, args, kwargs)


class _Calls(TorchFunctionMode):
    """Function mode that checks Python-level calls that never reach the dispatcher."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sentence = refused_call(func, args, kwargs)
        if sentence is not None:
            raise self._recorder.refuse(sentence)
        return func(*args, **kwargs)


def _shares_storage(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return any(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata for other in others)
