"""Tests of tools/prose.py, which finds banned words and long sentences: it finds them, and nothing in plain prose."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import prose


def findings(name: str, source: str) -> list[str]:
    """Return the findings in a file of this name, as text."""
    check = prose.check_markdown if name.endswith(".md") else prose.check_python
    return [str(finding) for finding in check(Path(name), source)]


@pytest.mark.parametrize("word", prose.INSTEAD)
@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("a.py", '"""Rows {}, tiles."""\n'),
        ("a.py", 'class A:\n    """Rows.\n\n    Tiles {} rows.\n    """\n'),
        ("a.py", 'x = 1\n"""Rows {} tiles."""\n'),
        ("a.py", "x = 1  # rows {} tiles\n"),
        ("a.md", "Rows {} tiles.\n"),
        ("a.md", "| a | b |\n|---|---|\n| rows | {} tiles |\n"),
        ("a.md", "* rows\n* {} tiles\n"),
    ],
)
def test_each_word_is_found_wherever_sentences_are_written(word, name, source):
    """A banned word is found in docstrings, comments, paragraphs, lists and table cells."""
    [found] = findings(name, source.format(word))
    assert f"'{word}'" in found


def test_a_finding_names_its_line():
    """A finding has the line of the banned word, even if the docstring begins on an earlier line."""
    [found] = findings("a.py", 'def f():\n    """Write rows.\n\n    Tiles beside rows.\n    """\n')
    assert found.startswith("a.py:4: 'beside'")


@pytest.mark.parametrize("first", sorted(prose.FIRST_WORDS))
def test_a_docstring_that_begins_with_a_fragment_is_found(first):
    """A docstring that begins with a word of a fragment, such as "Of", is found."""
    found = findings("a.py", f'def f():\n    """{first} the rows."""\n')
    assert f"begins with '{first}'" in found[0]


def test_a_long_sentence_of_a_page_is_found():
    """A sentence of 25 words passes and one of 26 is found. Inline code counts as one word, an address as none."""
    words = ["row"] * 24
    assert not findings("a.md", f"{' '.join(words)} end. {' '.join(words)} end.\n")
    assert not findings("a.md", f"{' '.join(words)} `{' '.join(words)}`.\n")
    assert not findings("a.md", f"{' '.join(words[1:])} [a page](https://example.org/a/b).\n")
    [found] = findings("a.md", f"{' '.join(words)} long end.\n")
    assert "26 words" in found


def test_code_is_not_read_as_a_sentence():
    """Banned words in code blocks, inline code and string constants are not reported."""
    assert not findings("a.md", "Call `tile.beside()`.\n\n```python\nbeside = 1  # alone\n```\n")
    assert not findings("a.py", '"""Call `tile.beside()` or ``alone``."""\nbeside = "alone"\n')


def test_a_long_subject_is_refused(tmp_path, monkeypatch, capsys):
    """A commit subject of 72 characters passes and one of 73 is refused; body lines may be longer."""
    assert not prose.check_subject("a" * 72 + "\n\n" + "b" * 200)
    message = tmp_path / "message"
    message.write_text("a" * 73)
    monkeypatch.setattr("sys.argv", ["prose", "--commit-message", str(message)])
    assert prose.main() == 1
    assert "73 characters" in capsys.readouterr().err
