"""Tables for docs/design.md, section 7: wheels, public names, circles of imports, a plugin author's first classes.

Lines of code are lines with code; blank lines, comments and docstrings do not count.

    python tools/house.py wheels
    python tools/house.py concepts
    python tools/house.py circles

`concepts` follows the annotations of the functions that a plugin implements. It collects each class of draftmark in a
parameter, result, field or property, and the classes in the annotations of that class. Errors do not count.

`circles` reads the imports of all wheels in their source: at the top, inside functions and for type checking. A module
that is found by its name at run time, as with `importlib`, is no import.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import inspect
import io
import pkgutil
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).parent.parent
PLUGIN = "draftmark.plugin:BackendPlugin"
TASKS = (PLUGIN, "draftmark.backend_info:BackendInfo", f"{PLUGIN}.buffers", f"{PLUGIN}.open_backend")
STEP_PATH = "draftmark.backend:AttentionBackend"
UNIONS = re.compile(r"\b(Tail|HostLengths)\b")
BLANK = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
TIMED = "import time; start = time.process_time(); import {}; print(time.process_time() - start)"


def main() -> None:
    """Print one table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("wheels", "concepts", "circles"))
    parser.add_argument("--of", nargs="*", default=TASKS, metavar="MODULE:NAME", help="functions of a plugin")
    given = parser.parse_args()
    tables = {"wheels": wheels, "circles": circles, "concepts": lambda: concepts([*given.of, STEP_PATH])}
    print(tables[given.table]())


def distributions(root: Path = ROOT) -> dict[str, str]:
    """Return the package of each distribution of a tree, by folder."""
    found = {}
    for project in sorted(root.glob("*/*/pyproject.toml")):
        packages = [path.parent.name for path in project.parent.glob("src/*/__init__.py")]
        if packages and "project" in tomllib.loads(project.read_text()):
            [found[project.parent.relative_to(root).as_posix()]] = packages
    return found


def wheels() -> str:
    """Return a Markdown table of the wheels: files, lines, modules with one importer, needs, and seconds to import."""
    rows = [
        "| wheel | files | lines | lines of code | one importer | needs | import |",
        "|---|---|---|---|---|---|---|",
    ]
    for folder, module in distributions().items():
        texts = [path.read_text() for path in (ROOT / folder / "src").rglob("*.py")]
        lines = f"{sum(len(text.splitlines()) for text in texts):,} | {sum(map(code_lines, texts)):,}"
        importers = Counter(name for names in imports([folder]).values() for name in names)
        needs = ", ".join(tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["dependencies"])
        once = sum(count == 1 for count in importers.values())
        name = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["name"]
        start = f"{name} | {len(texts)} | {lines} | {once} | {needs}"
        rows.append(f"| {start} | {seconds(module):.2f} s |")
    api = {
        name: importlib.import_module(name).__all__
        for name in ("draftmark", "draftmark.runtime", "draftmark_tools.models")
    }
    return "\n".join([*rows, "", *(f"{len(names)} public names in {module}" for module, names in api.items())])


def circles() -> str:
    """Return a Markdown table of the circles of imports between the modules of all wheels."""
    found = [f"| {', '.join(sorted(one))} |" for one in circles_of(imports(distributions()))]
    return "\n".join(["| modules that import each other in a circle |", "|---|", *found])


def imports(folders: Iterable[str]) -> dict[str, set[str]]:
    """Return the modules of these wheels that each of their modules imports, anywhere in its source."""
    sources = [ROOT / folder / "src" for folder in folders]
    paths = {path.relative_to(one).with_suffix("").parts: path for one in sources for path in one.rglob("*.py")}
    trees = {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for parts, path in paths.items()}
    found = {}
    for name, path in trees.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        nodes = list(ast.walk(ast.parse(path.read_text())))
        named = [one.name for node in nodes if isinstance(node, ast.Import) for one in node.names]
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                place = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                inside = [f"{place}.{one.name}" for one in node.names]
                named += [one if one in trees else place for one in inside]
        found[name] = {one for one in named if one in trees and one != name}
    return found


def circles_of(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the largest sets of modules in which each one reaches every other one."""
    reached = {name: _reached(graph, name) for name in graph}
    found = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted((set(one) for one in found if one), key=sorted)


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found, waiting = set(), list(graph[start])
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += graph[name]
    return found


def code_lines(text: str) -> int:
    """Return the number of a module's lines that contain code."""
    tokens = [one for one in tokenize.generate_tokens(io.StringIO(text).readline) if one.type not in BLANK]
    words = [one.value for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Expr)]
    prose = [one for one in words if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return len(
        _spanned((one.start[0], one.end[0]) for one in tokens) - _spanned((n.lineno, n.end_lineno) for n in prose)
    )


def _spanned(places: Iterable[tuple[int, int | None]]) -> set[int]:
    return {line for first, last in places for line in range(first, (last or first) + 1)}


def seconds(module: str) -> float:
    """Return the processor time in seconds of the fastest of five imports, each in a new process."""
    command = (sys.executable, "-c", TIMED.format(module))
    return min(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(5))


def concepts(start: Iterable[str]) -> str:
    """Return the number and names of classes that the annotations of `start` lead to, with their members and fields."""
    known = classes()
    waiting = [target(where) for where in start]
    met = {thing.__name__: thing for thing in waiting if isinstance(thing, type)}
    while waiting:
        text = " ".join(annotations(waiting.pop()))
        for name in re.findall(r"\w+", UNIONS.sub(lambda word: joined(word[0]), text)):
            if name in known and name not in met:
                met[name] = known[name]
                waiting.append(known[name])
    enums = [kind for kind in met.values() if issubclass(kind, Enum)]
    members = sum(len(kind) for kind in enums)
    parts = sum(len(fields(kind)) for kind in met.values() if is_dataclass(kind))
    counts = f"{len(met)} classes ({len(enums)} enumerations with {members} members), {parts} fields"
    return f"{counts}: {', '.join(sorted(met))}"


def joined(alias: str) -> str:
    """Return the names of the classes that a union's alias, such as `Tail`, stands for."""
    home = "draftmark.batch" if alias == "Tail" else "draftmark.lengths"
    return " ".join(kind.__name__ for kind in get_args(target(f"{home}:{alias}")))


def target(where: str) -> Any:
    """Import the object with a name of the form ``module:a.b``."""
    module, _, path = where.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def classes() -> dict[str, type]:
    """Return the core's classes by name, except errors."""
    package, found = importlib.import_module("draftmark"), {}
    for row in pkgutil.walk_packages(package.__path__, "draftmark."):
        for name, kind in vars(importlib.import_module(row.name)).items():
            own = isinstance(kind, type) and kind.__module__.startswith("draftmark") and not issubclass(kind, Exception)
            if own and not name.startswith("_"):
                found[name] = kind
    return found


def annotations(thing: Any) -> list[str]:
    """Return the annotations of a function or class as text."""
    if inspect.isfunction(thing):
        return [str(text) for text in thing.__annotations__.values()]
    found = [str(text) for text in vars(thing).get("__annotations__", {}).values()]
    for name, value in vars(thing).items():
        if isinstance(value, property) and value.fget is not None:
            found += annotations(value.fget)
        elif inspect.isfunction(value) and getattr(thing, "_is_protocol", False) and not name.startswith("_"):
            found += annotations(value)
    return found


if __name__ == "__main__":
    main()
