"""Tests of the example engine and of the page that explains it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from textwrap import indent

ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "examples" / "engine.py"
PAGE = (ROOT / "docs" / "one-step.md").read_text(encoding="utf-8")


def test_engine_prints_what_its_page_shows():
    """The example prints the page's text block, and every generated text equals plain decoding."""
    (printed,) = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    done = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True)
    assert done.stdout == printed, done.stderr[-2000:]
    assert "3 of 3 texts equal" in done.stdout


def test_page_shows_the_code_of_the_engine():
    """Each code block that names examples/engine.py consists of consecutive lines of that file, except indentation."""
    source = PROGRAM.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python file=examples/engine\.py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        assert any(indent(block, " " * depth) in source for depth in (0, 4, 8)), block


def test_missing_kv_move_changes_the_tokens(monkeypatch):
    """If accepted KV is not moved out of its tree slot, the example's comparison with plain decoding fails."""
    spec = importlib.util.spec_from_file_location("example_engine", PROGRAM)
    assert spec is not None and spec.loader is not None
    engine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(engine)
    prompts = [[engine.LETTERS.index(letter) for letter in prompt] for prompt in engine.PROMPTS]
    plain, _ = engine.generate(prompts, 64, drafts=False)
    assert engine.generate(prompts, 64, drafts=True)[0] == plain
    monkeypatch.setattr("draftmark.tree.TorchTreeOps.compact", lambda *_: None)
    assert engine.generate(prompts, 64, drafts=True)[0] != plain
