"""Check of the words in docstrings, comments and documents, and of a commit's subject.

    python -m tools.prose                          check every file that git tracks
    python -m tools.prose PATH …                   check these files or folders only
    python -m tools.prose --commit-message FILE    check the subject of a commit message (CONTRIBUTING.md's hook)

A word list finds words, not sense: CONTRIBUTING.md has the rules that only a reader can check.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parent.parent
SUBJECT_LENGTH = 72
"""Characters of a commit's subject."""
SENTENCE_LENGTH = 25
"""Words of a sentence in a document."""
FIRST_WORDS = frozenset(("As", "How", "Of", "That", "Those", "What", "Where", "Whether", "Which", "Who", "Whose"))
"""Words that no docstring begins with: what follows them is a fragment, not a sentence."""
INSTEAD = {
    "alone": "only",
    "as many": "the number itself",
    "asked": "the verb of the field: reads, requests, selects",
    "behind": "after",
    "beside": "next to, compared with",
    "but for": "except",
    "in all": "the total",
    "likewise": "also",
    "mend": "fix",
    "mended": "fixed",
    "mends": "fixes",
    "nobody": "the thing: padding rows, no backend",
    "of which": "a sentence of its own",
    "of whom": "a sentence of its own",
    "so many": "the number itself",
    "take turns": "alternate",
    "told": "the verb of the field: receives, is given",
    "whose": "a sentence of its own",
}
"""Words and phrases of a private dialect, and what to write instead."""
BANNED = re.compile(r"\b(" + "|".join(sorted(INSTEAD, key=len, reverse=True)) + r")\b", re.IGNORECASE)
CODE = re.compile(r"``.*?``|`[^`]*`", re.DOTALL)
MARKDOWN = MarkdownIt("commonmark").enable("table")


class Finding(NamedTuple):
    """One place in a file that breaks a rule.

    Attributes:
        path: the file, relative to the root of the repository.
        line: number of the line, from 1.
        text: the rule and the words that break it, in one sentence.
    """

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every docstring, attribute docstrings included."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                yield child.lineno, child.value.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# ?(fmt|noqa|type|mypy|ruff|pragma)\b", token.string):
            yield token.start[0], token.string.lstrip("# ")


def paragraphs(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the words of every paragraph, heading, list item and table cell of a Markdown page.

    Code and addresses are left out: a piece of code counts as one word.
    """
    for token in MARKDOWN.parse(source):
        if token.type == "inline" and token.map:
            parts = {"text": lambda one: one.content, "code_inline": lambda one: "code", "softbreak": lambda one: " "}
            yield token.map[0] + 1, "".join(parts.get(one.type, lambda one: "")(one) for one in token.children or ())


def banned(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line within the text, sentence for the user) for every banned word."""
    plain = CODE.sub(lambda match: "code" + "\n" * match[0].count("\n"), text)
    for match in BANNED.finditer(plain):
        word = match[0].lower()
        yield plain.count("\n", 0, match.start()), f"'{match[0]}' is not written here; write {INSTEAD[word]}"


def check_python(path: Path, source: str) -> Iterator[Finding]:
    """Check docstrings and comments of one Python file."""
    for line, text in docstrings(source):
        first = re.match(r"[A-Za-z]+", text)
        if first and first[0] in FIRST_WORDS:
            yield Finding(path, line, f"a docstring begins with '{first[0]}'; begin with a noun or an imperative verb")
        for below, sentence in banned(text):
            yield Finding(path, line + below, sentence)
    for line, text in comments(source):
        for _, sentence in banned(text):
            yield Finding(path, line, sentence)


def check_markdown(path: Path, source: str) -> Iterator[Finding]:
    """Check the words and the length of sentences of one Markdown page."""
    for line, text in paragraphs(source):
        for _, sentence in banned(text):
            yield Finding(path, line, sentence)
        for sentence in re.split(r"(?<=[.!?])\s+(?=\S)", text):
            if (words := len(sentence.split())) > SENTENCE_LENGTH:
                shown = " ".join(sentence.split()[:6])
                yield Finding(path, line, f"a sentence has {words} words, at most {SENTENCE_LENGTH}: '{shown} …'")


def check(path: Path) -> list[Finding]:
    """Return the findings in one file; a file that is neither Python nor Markdown has none."""
    checks = {".py": check_python, ".md": check_markdown}
    if path.suffix not in checks:
        return []
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return list(checks[path.suffix](shown, path.read_text(encoding="utf-8")))


def check_subject(message: str) -> str:
    """Return what is wrong with a commit message's subject, or an empty string."""
    subject = message.split("\n", 1)[0]
    if len(subject) > SUBJECT_LENGTH:
        return (
            f"the commit's subject has {len(subject)} characters, at most {SUBJECT_LENGTH}; move the rest into the body"
        )
    return ""


def tracked(places: list[str]) -> list[Path]:
    """Return the files that git tracks in these places, or in the whole repository if there are none."""
    done = subprocess.run(["git", "ls-files", "--", *places], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for name in done.stdout.splitlines() if (path := ROOT / name).exists()]


def main() -> int:
    """Run the command line; return 1 if something breaks a rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", metavar="PATH")
    parser.add_argument("--commit-message", type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.commit_message:
        fault = check_subject(given.commit_message.read_text(encoding="utf-8"))
        print(fault, end="\n" if fault else "", file=sys.stderr)
        return int(bool(fault))
    findings = [finding for path in tracked(given.places) for finding in check(path)]
    for finding in findings:
        print(finding)
    print(f"{len(findings)} findings")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
