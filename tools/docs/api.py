"""Pages that mkdocstrings makes from docstrings: integers, tensors, models, hooks and the speculative engine."""

from __future__ import annotations

from collections.abc import Callable

TEXTS = {
    "api.md": ("Integers", "Modules that need no torch: geometry, buffers, errors, loading a backend.", "draftmark"),
    "runtime.md": ("Tensors", "Objects that an engine passes to a backend at every step.", "draftmark.runtime"),
    "models.md": ("Models", "Shapes of layers from Hugging Face configurations.", "draftmark_tools.models"),
    "hooks.md": ("Hooks", "Methods of a plugin; a module has each as a function `draftmark_NAME`.", "draftmark.plugin"),
    "engine.md": ("Speculative engine", "The loop that decodes models over a backend.", "draftmark_speculative"),
}
"""Page, title, one sentence, module."""


def _page(title: str, sentence: str, module: str) -> Callable[[], str]:
    return lambda: f"# {title}\n\n{sentence}\n\n::: {module}\n"


PAGES: dict[str, Callable[[], str]] = {name: _page(*text) for name, text in TEXTS.items()}
