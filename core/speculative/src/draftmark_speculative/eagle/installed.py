"""Draft heads that are installed as packages: entry-point group ``draftmark.heads.v1``.

A package that ships a head names the model in its metadata, and carries the folder that `DraftHead.save` wrote::

    [project.entry-points."draftmark.heads.v1"]
    "smollm2-135m-instruct" = "draftmark_head_smollm2_135m"

The value is an importable package; head.json lies in the package's folder. The package is found, not imported, so it
needs no code. A head serves every model whose name, in lower case, begins with the entry point's name: a quantised
file "SmolLM2-135M-Instruct.Q4_1.gguf" is the same model as the folder "SmolLM2-135M-Instruct". The longest name wins.
"""

from __future__ import annotations

import importlib.metadata as md
import importlib.util
from pathlib import Path

from draftmark import ModelError

GROUP = "draftmark.heads.v1"


def installed_heads() -> dict[str, str]:
    """Model name (lower case) → package that carries its head; imports none of them."""
    return {entry.name.lower(): entry.value for entry in md.entry_points(group=GROUP)}


def installed_head(model_name: str) -> Path:
    """The folder of the head that was trained for a model.

    Raises:
        ModelError: none is installed, or the package does not hold one.
    """
    heads = installed_heads()
    fitting = sorted((name for name in heads if model_name.lower().startswith(name)), key=len)
    if not fitting:
        known = ", ".join(sorted(heads)) or "none"
        raise ModelError(
            f"no draft head is installed for model {model_name!r} (heads are installed for: {known}); pip install one, "
            "or name the folder of a head"
        )
    package = heads[fitting[-1]]
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / "head.json").is_file():
            return Path(folder)
    raise ModelError(
        f"package {package!r} says that it carries the draft head of {fitting[-1]!r}, but it holds no head.json; "
        "install it again"
    )
