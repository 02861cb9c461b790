"""Expert choices of a mixture-of-experts model, recorded in one forward and repeated in another.

In half precision, rounding changes which experts a router selects where two scores are close. Another expert changes
the logits by more than any rounding. Two forwards with the same experts differ by rounding only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Routing:
    """Outputs of all routers of some modules in one forward.

    The routers are the modules that transformers itself records as ``router_logits``. A model without such modules has
    no routers here.

    Args:
        modules: the model, or another module with layers of the same class.
        hf: the transformers model that names its router class; None means `modules`.
    """

    def __init__(self, modules: Any, hf: Any = None) -> None:
        recorder = (getattr(modules if hf is None else hf, "_can_record_outputs", None) or {}).get("router_logits")
        kind = getattr(recorder, "target_class", recorder)
        self._routers: list[Any] = [
            module for module in modules.modules() if isinstance(kind, type) and isinstance(module, kind)
        ]
        self._outputs: dict[Any, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._routers)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the routers' outputs of the forward that runs inside the context."""

        def record(module: Any, args: Any, output: Any) -> None:
            self._outputs[module] = output

        with self._hooked(record):
            yield

    @contextmanager
    def repeated(self, rows: torch.Tensor | None = None) -> Iterator[None]:
        """Replace the routers' outputs by the recorded ones inside the context.

        Args:
            rows: int64, recorded rows of the forward inside the context, in its order; None means all, in order.
        """

        def recorded(module: Any, args: Any, output: Any) -> Any:
            kept = self._outputs[module]
            if rows is None:
                return kept
            return kept[rows] if isinstance(kept, torch.Tensor) else tuple(one[rows] for one in kept)

        with self._hooked(recorded):
            yield

    @contextmanager
    def _hooked(self, hook: Callable[[Any, Any, Any], Any]) -> Iterator[None]:
        handles = [module.register_forward_hook(hook) for module in self._routers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
