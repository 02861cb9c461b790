"""A kernel launch of a state layer: recorded and repeated on a GPU, interpreted on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from draftmark.runtime import record_call

from ..launch.relaunch import RelaunchCache


class Launch:
    """Calls a launch function; on a GPU, later calls with equal layouts repeat its launches.

    Args:
        function: takes hashable values, then tensors; launches kernels.
        names: kernel parameter of each tensor.
    """

    def __init__(self, function: Callable[..., None], names: tuple[str, ...]) -> None:
        self._function, self._cache = function, RelaunchCache(names)

    def __call__(
        self, values: tuple[Any, ...], tensors: tuple[torch.Tensor | None, ...], mutates: Sequence[torch.Tensor]
    ) -> None:
        """Launch over tensors; CPU tensors go through `record_call`, so a recorded graph repeats the launch.

        Args:
            values: everything else that the launches depend on.
            tensors: every tensor of the launches; the first is never None.
            mutates: tensors that the launches write.
        """
        first = tensors[0]
        assert first is not None
        if not first.is_cuda:
            record_call(self._function, *values, *tensors, mutates=tuple(mutates))
            return
        layout = tuple(None if one is None else (one.shape, one.stride(), one.dtype) for one in tensors)
        self._cache((values, layout), tensors, self._function, *values)
