"""Runner of notebooks: it stores their output and makes their pages on the site.

python -m tools.docs.notebooks        # run each notebook and store its output in it
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from .kills import DOCS

FOLDER = DOCS / "notebooks"


def executed(path: Path) -> dict[str, Any]:
    """Run the notebook in a new process and return it with the output of its cells.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised an error.
    """
    nbformat: Any = importlib.import_module("nbformat")  # untyped: a plain import would fail the type check
    client = importlib.import_module("nbclient").NotebookClient
    book = nbformat.read(path, as_version=4)
    # A busy machine splits a cell's output into more messages; joined, the output is equal in every run.
    settings = {"kernel_name": "python3", "coalesce_streams": True, "resources": {"metadata": {"path": str(FOLDER)}}}
    client(book, timeout=None, **settings).execute()
    for cell in book.cells:  # run times change with every run; stored output must not
        cell.metadata.pop("execution", None)
    found: dict[str, Any] = json.loads(nbformat.writes(book))
    return found


def page(path: Path) -> str:
    """Return the notebook as Markdown: text, code and output."""
    book = json.loads(path.read_text(encoding="utf-8"))
    return "\n\n".join(_cell(cell) for cell in book["cells"]) + "\n"


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    return "\n\n".join([f"```python\n{source}\n```", *(_output(one) for one in cell["outputs"])])


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/svg+xml" in data:
        return f"<div>{''.join(data['image/svg+xml']).strip()}</div>"
    return "```text\n" + "".join(output.get("text", data.get("text/plain", ""))).rstrip() + "\n```"


def main() -> None:
    """Run every notebook and store its output in the file."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        path.write_text(json.dumps(executed(path), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
