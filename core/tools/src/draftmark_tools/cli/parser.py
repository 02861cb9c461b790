"""Argument parser of the command line, with one subparser per command and errors on one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from draftmark.version import CONTRACT_MAJOR, CONTRACT_MINOR, __version__

from .commands import PARTS, Command, Unusable, command, installed
from .errors import WRONG_ARGUMENTS
from .rendering import printable

DESCRIPTION = """\
Attention backends for LLM engines that decode speculatively: find the
backends, size their buffers, decode with them."""

EXAMPLES = """\
examples:
  draftmark list
  draftmark size reference --topk 8 --num-draft-tokens 64
  draftmark doctor"""


class Parser(argparse.ArgumentParser):
    """An argparse parser with one-line errors, defaults in the help, and no abbreviated options."""

    def __init__(self, **keywords: object) -> None:
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, **keywords)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Print the error and the --help command to read; exit with code 2."""
        self.exit(WRONG_ARGUMENTS, f"{self.prog}: {printable(message)}; see `{self.prog} --help`\n")


class CommandParser(Parser):
    """Parser of one command, which reports unknown arguments itself with the command's own --help."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse the arguments; report every unknown one, so that the main parser gets none."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return found, left


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help formatter that keeps examples as written and shows the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default is None or default is False or default == argparse.SUPPRESS or default in ([], ()):
            return action.help
        if isinstance(default, tuple):
            return f"{action.help} (default: {','.join(map(str, default))})"
        return super()._get_help_string(action)


def parse(argv: Sequence[str] | None) -> tuple[Command, argparse.Namespace]:
    """Return the command module and its arguments. Raises SystemExit for --help and wrong arguments, like argparse."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser, modules = build()
    if argv and argv[0] in PARTS and argv[0] not in modules:
        parser.error(f"{argv[0]!r} is not installed: {PARTS[argv[0]]}")
    if not argv:
        parser.print_help(sys.stderr)
        raise SystemExit(WRONG_ARGUMENTS)
    args = parser.parse_args(argv)
    return modules[args.command], args


def build() -> tuple[Parser, dict[str, Command]]:
    """Return the parser of every installed command, and the command modules by name."""
    absent = "".join(f"\n  {name}: {remedy}" for name, remedy in PARTS.items() if name not in installed())
    epilog = EXAMPLES + (f"\n\nnot installed:{absent}" if absent else "")
    parser = Parser(prog="draftmark", description=DESCRIPTION, epilog=epilog)
    version = f"draftmark {__version__} (contract v{CONTRACT_MAJOR}.{CONTRACT_MINOR})"
    parser.add_argument("--version", action="version", version=version)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=CommandParser)
    modules: dict[str, Command] = {}
    for name, entry in installed().items():
        try:
            module = command(entry)
        except Exception as error:  # a broken distribution must not disable the other commands
            module = Unusable(entry, error)
        modules[name] = module
        description = module.SUMMARY[0].upper() + module.SUMMARY[1:] + "."
        sub = subparsers.add_parser(name, help=module.SUMMARY, description=description, epilog=module.EXAMPLES)
        module.configure(sub)
        sub.add_argument("--debug", action="store_true", help="print the traceback of an error")
    return parser, modules
