"""Draft heads installed as packages: entry-point group ``draftmark.heads.v1``.

A package with a head names the model in its metadata, and contains the folder that `DraftHead.save` wrote::

    [project.entry-points."draftmark.heads.v1"]
    "smollm2-135m-instruct" = "draftmark_head_smollm2_135m"

The value is an importable package with head.json in its folder. The package is located, not imported, so it needs no
code. A head serves every model with a name that begins, in lower case, with the entry point's name. So a quantised file
"SmolLM2-135M-Instruct.Q4_1.gguf" and the folder "SmolLM2-135M-Instruct" are one model. The longest matching name wins.
"""

from __future__ import annotations

import importlib.metadata as md
import importlib.util
from pathlib import Path

from draftmark import ModelError

GROUP = "draftmark.heads.v1"


def installed_heads() -> dict[str, str]:
    """Return a map from model name (lower case) to the package with its head; no package is imported."""
    return {entry.name.lower(): entry.value for entry in md.entry_points(group=GROUP)}


def installed_head(model_name: str) -> Path:
    """Return the folder of the installed head for a model.

    Raises:
        ModelError: no head is installed for the model, or the package does not contain it.
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
        f"package {package!r} is registered for the draft head of {fitting[-1]!r}, but it has no head.json; "
        "install it again"
    )
