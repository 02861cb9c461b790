"""Writer of the command line's reference page, made from the argument parsers."""

from __future__ import annotations

import argparse
import os

from draftmark_tools.cli.parser import build

HEAD = """# Command line

Every command, made from its parser. The `draftmark` package has `list`, `doctor`, `size`, `explain` and `warm`; the
other commands come with `draftmark-contract` and `draftmark-speculative`. Exit codes: 0 for success, 2 for wrong
arguments, 130 after an interrupt, else 1.
"""


def page() -> str:
    """Return the whole page as Markdown. The width of the terminal does not change it."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"  # argparse wraps usage lines at the terminal's width, so it is fixed here
    try:
        commands = _commands(build()[0])
        return "\n".join([HEAD, *(_command(name, one) for name, one in commands.items())])
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)


def _commands(whole: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    [choices] = [one for one in whole._actions if isinstance(one, argparse._SubParsersAction)]
    return dict(choices.choices)


def _command(name: str, one: argparse.ArgumentParser) -> str:
    usage = one.format_usage().removeprefix("usage: ").rstrip()
    lines = [f"## draftmark {name}", "", one.description or "", "", "```text", usage, "```", ""]
    lines += ["| argument | meaning | default |", "|---|---|---|"]
    lines += [_argument(action) for action in one._actions]
    if one.epilog:
        lines += ["", "```text", one.epilog.strip(), "```"]
    return "\n".join(lines) + "\n"


def _argument(action: argparse.Action) -> str:
    names = ", ".join(f"`{option}`" for option in action.option_strings) or f"`{_metavar(action)}`"
    if action.option_strings and action.nargs != 0:
        names += f" `{_metavar(action)}`"
    default = (
        "" if action.default in (None, False, argparse.SUPPRESS) or action.default == [] else f"`{action.default}`"
    )
    what = (action.help or "") % {**vars(action), "prog": "draftmark"}
    return f"| {names} | {_cell(what)} | {_cell(default)} |"


def _metavar(action: argparse.Action) -> str:
    named = action.metavar or (",".join(map(str, action.choices)) if action.choices else action.dest.upper())
    return named if isinstance(named, str) else " ".join(named)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
