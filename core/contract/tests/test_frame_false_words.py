"""Tests of runs that end for a reason outside the backend: they give no verdict and record nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import verdicts
from verdicts import verdict

from draftmark_contract.check import Tier
from draftmark_contract.profiles import SHAPES, Profile
from draftmark_contract.runner import plugin as plugin_subject
from draftmark_contract.runner.item import Item, all_items
from draftmark_contract.runner.journal import Journal
from draftmark_contract.runner.outcome import Outcome
from draftmark_contract.runner.outputs import write_whole
from draftmark_contract.runner.page import page

ONE = "supports.mandatory_profile"
FILES = ("--json", "v.json", "--record", "r.json", "--html", "p.html")
PART = ("--allow-part", "--json", "v.json")
LIMITED = """
import resource, sys
from draftmark_tools.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
sys.exit(main(sys.argv[2:]))
"""
"""Program that runs a command line with a limit on the size of files, which acts like a disk that fills."""
DEADLINE_S = 120.0


class Folder:
    """Working folder of a `draftmark contract` command; the folder of the tested plugin is on the command's path."""

    def __init__(self, path: Path, *plugins: Path) -> None:
        self.path = path
        path = [*map(str, plugins), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}

    def start(self, *argv: object, most_bytes: int | None = None, **env: str) -> subprocess.Popen[str]:
        """Start `draftmark contract`."""
        limited = ("-c", LIMITED, most_bytes) if most_bytes else ("-m", "draftmark_tools.cli")
        command = [sys.executable, *map(str, limited), "contract", *map(str, argv)]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=self.path, env={**self._environment, **env}, **output)  # type: ignore[call-overload,no-any-return]

    def run(self, *argv: object, **more: Any) -> tuple[int, str]:
        """Run `draftmark contract` until it exits; return the exit code and the output."""
        with self.start(*argv, **more) as process:
            out, err = process.communicate()
        return process.returncode, out + err

    def assert_nothing_recorded(self) -> None:
        """Assert that no output file exists, not even a part of one."""
        assert [path.name for path in self.path.iterdir() if path.suffix in (".json", ".html", ".part")] == []


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Return a working folder without a plugin."""
    made = tmp_path / "work"
    made.mkdir()
    return Folder(made)


Plugin = Callable[[str], Folder]


@pytest.fixture
def plugin(tmp_path: Path, distribution: Callable[..., Path]) -> Plugin:
    """Return a function that installs a plugin "odd", which runs the given code in one call of supports()."""

    def make(act: str) -> Folder:
        body = f"{act}\n@hookimpl\ndef draftmark_supports(geometry):\n"
        body += "    act() if geometry.limits.max_context_len == 1000 else None\n    return []\n"
        site = distribution("odd", extra=body)
        (tmp_path / "work").mkdir()
        return Folder(tmp_path / "work", site)

    return make


def _wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.05)


def _children(pid: int) -> Iterator[int]:
    """Yield the ids of a process's children and of all their descendants, on Linux."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    for child in map(int, path.read_text().split()) if path.exists() else ():
        yield child
        yield from _children(child)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_full_disk_under_the_journal_gives_no_verdict(folder: Folder, workers: int) -> None:
    """The first failed write of the journal stops the run; after space is freed, the next run continues."""
    few = "answers_alike and not elsewhere"
    command = ("reference", "--tier", "sizing", "-k", few, "--journal", "run.jsonl", *FILES)
    code, text = folder.run(*command, "--workers", workers, most_bytes=6000)
    assert code == 2 and "reference has no verdict on draftmark contract" in text, text
    assert "run.jsonl cannot be written (File too large); free space there, then run the command again" in text
    assert "does not conform" not in text and "Traceback" not in text
    folder.assert_nothing_recorded()
    kept = len(Journal(folder.path / "run.jsonl").ended())
    assert kept > 0 and (folder.path / "run.jsonl").stat().st_size <= 6000
    code, text = folder.run(*command[: -len(FILES)], *PART)
    assert code == 0, text
    record = json.loads((folder.path / "v.json").read_text())
    assert [run["items"] for run in record["runs"]] == [kept, len(record["results"]) - kept]


@pytest.mark.long
def test_device_that_is_full_gives_no_verdict(folder: Folder) -> None:
    """If the journal's first line cannot be written, the run gives no verdict."""
    code, text = folder.run("reference", "--tier", "sizing", "-k", ONE, "--journal", "/dev/full", *FILES)
    assert code == 2 and "the journal /dev/full cannot be written (No space left on device)" in text
    folder.assert_nothing_recorded()


@pytest.mark.parametrize("k", ["((", "a(b=1)", "not"])
def test_bad_expression_is_named(folder: Folder, k: str) -> None:
    """If -k has no valid expression, the command ends with one sentence that contains the expression."""
    code, text = folder.run("reference", "-k", k, *FILES)
    assert code == 2 and text.startswith(f"draftmark contract: -k {k!r} is no expression: "), text
    assert len(text.splitlines()) == 1
    folder.assert_nothing_recorded()


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "number"),
    [
        pytest.param(1, signal.SIGTERM, id="1-SIGTERM"),
        pytest.param(2, signal.SIGINT, id="2-Ctrl-C", marks=pytest.mark.slow),
        pytest.param(1, signal.SIGINT, id="1-Ctrl-C", marks=pytest.mark.slow),
        pytest.param(2, signal.SIGTERM, id="2-SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_interrupted_run_gives_no_verdict(folder: Folder, workers: int, number: int) -> None:
    """Ctrl-C and SIGTERM end the run without a verdict; the next run with that journal continues."""
    journal = Journal(folder.path / "run.jsonl")
    command = ("reference", "--tier", "sizing", "--journal", "run.jsonl", *FILES)
    with folder.start(*command, "--workers", workers) as process:
        _wait(lambda: len(journal.ended()) > 5)
        process.send_signal(number)
        out, err = process.communicate()
    assert process.returncode == 2, out + err
    assert "reference has no verdict on draftmark contract" in out and "because the run was interrupted" in out
    assert "does not conform" not in out and "Traceback" not in out + err
    folder.assert_nothing_recorded()
    kept = len(journal.ended())
    code, text = folder.run(*command, "-k", ONE)
    assert code == 2 and "only 5 of " in text, text
    folder.assert_nothing_recorded()
    assert len(journal.ended()) >= kept


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_with_a_killed_parent(folder: Folder) -> None:
    """After kill -9 of the command, its workers stop writing the journal, and a new run continues it."""
    journal = Journal(folder.path / "run.jsonl")
    command = ("reference", "--tier", "sizing", "--journal", "run.jsonl")
    with folder.start(*command, "--workers", 2) as process:
        _wait(lambda: len(journal.ended()) > 5)
        below = list(_children(process.pid))
        process.kill()
    assert len(below) >= 2
    _wait(lambda: not any(map(_alive, below)))
    kept = len(journal.ended())
    code, text = folder.run(*command, "-k", ONE, "--allow-part")
    assert code == 0 and "only 5 of " in text, text
    assert len(journal.ended()) >= kept


@pytest.mark.long
def test_second_run_on_a_journal_is_refused(folder: Folder) -> None:
    """A second run on a journal in use ends with one sentence; it works after the first run has ended."""
    command = ("reference", "--tier", "sizing", "-k", ONE, "--journal", "run.jsonl", "--allow-part")
    with Journal(folder.path / "run.jsonl").locked():
        code, text = folder.run(*command)
        assert code == 2 and "another run writes to the journal" in text and "or name another file" in text
        assert len(text.splitlines()) == 1
    assert folder.run(*command)[0] == 0


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_process_gives_no_verdict(plugin: Plugin, workers: int) -> None:
    """A run ended by SIGKILL gives no verdict; the output suggests the system's out-of-memory killer as the cause."""
    folder = plugin("import os, signal\ndef act():\n    os.kill(os.getpid(), signal.SIGKILL)\n")
    code, text = folder.run("odd", "--tier", "sizing", "-k", ONE, "--workers", workers, *FILES)
    assert code == 2 and "odd has no verdict" in text, text
    assert "SIGKILL ended a process of the run" in text and "out-of-memory killer" in text
    assert "does not conform" not in text
    folder.assert_nothing_recorded()


@pytest.mark.long
@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("MemoryError()", "memory ran out (MemoryError)"),
        (
            "OSError(28, 'No space left on device', 'cache')",
            "a file cannot be written (No space left on device: cache)",
        ),
        (
            "RuntimeError('DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes.')",
            "memory ran out (RuntimeError: DefaultCPUAllocator",
        ),
        (
            "ImportError('libvendor.so: failed to map segment from shared object')",
            "memory ran out (ImportError: libvendor.so",
        ),
    ],
    ids=["memory", "disk", "torch", "loader"],
)
def test_exhausted_machine_gives_no_verdict(plugin: Plugin, error: str, words: str) -> None:
    """An item that fails because the machine has no memory or disk left gives no verdict on the backend."""
    folder = plugin(f"def act():\n    raise {error}\n")
    code, text = folder.run("odd", "--tier", "sizing", "-k", ONE, *FILES)
    assert code == 2 and f"because in {ONE}[padded] {words}" in text, text
    assert "does not conform" not in text
    folder.assert_nothing_recorded()


@pytest.mark.long
@pytest.mark.parametrize("enough", [True, False])
def test_item_that_lacked_memory_beside_others_runs_again_alone(plugin: Plugin, enough: bool) -> None:
    """The item counts as it ends without other processes; if memory runs out there too, the run gives no verdict."""
    again = "os.path.exists('tried')" if enough else "False"
    raises = "open('tried', 'a').write('x')\n        raise MemoryError"
    folder = plugin(f"import os\ndef act():\n    if not {again}:\n        {raises}\n")
    code, text = folder.run("odd", "--tier", "sizing", "-k", ONE, "--workers", 2, *PART)
    tried = (folder.path / "tried").read_text()
    if enough:
        outcomes = [row["outcome"] for row in json.loads((folder.path / "v.json").read_text())["results"]]
        assert code == 0 and outcomes == ["passed"] * 5 and tried == "x", text
    else:
        assert code == 2 and f"because in {ONE}[padded] memory ran out" in text and tried == "xx", text


@pytest.mark.long
def test_impossible_request_of_memory_is_the_backends_failure(plugin: Plugin) -> None:
    """If a backend requests more memory than the machine has, its item fails."""
    text = "DefaultCPUAllocator: not enough memory: you tried to allocate 9223372036854775807 bytes."
    code, said = plugin(f"def act():\n    raise RuntimeError({text!r})\n").run("odd", "--tier", "sizing", "-k", ONE)
    assert code == 1 and "odd does not conform" in said, said


@pytest.mark.long
@pytest.mark.parametrize("code", [0, *(pytest.param(code, marks=pytest.mark.slow) for code in (1, 2))])
def test_exit_code_of_a_plugin_is_no_verdict(plugin: Plugin, code: int) -> None:
    """If a hook calls os._exit, its item fails, whatever the exit code is."""
    folder = plugin(f"import os\ndef act():\n    os._exit({code})\n")
    status, text = folder.run("odd", "--tier", "sizing", "-k", ONE, "--json", "v.json")
    assert status == 1 and "odd does not conform" in text, text
    outcomes = {row["item"]: row["outcome"] for row in json.loads((folder.path / "v.json").read_text())["results"]}
    assert [item for item, outcome in outcomes.items() if outcome == "failed"] == [f"{ONE}[padded]"]
    assert len(outcomes) == 5


@pytest.mark.long
@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)", "os.closerange(3, 99), time.sleep(60)"])
def test_end_outside_of_an_item_gives_no_verdict(plugin: Plugin, end: str) -> None:
    """A process that ends between two items, or closes its pipe there, does not count against the backend."""
    late = f"import os, threading, time\ndef end():\n    time.sleep(0.5)\n    {end}\n"
    late += "if 'draftmark_contract.runner.worker' in __import__('sys').orig_argv:\n"
    late += "    threading.Thread(target=end, daemon=True).start()\ndef act():\n    pass\n"
    folder = plugin(late)
    code, text = folder.run("odd", "--tier", "sizing", "-k", "nothing_matches or load", *FILES)
    assert code == 2 and "odd has no verdict" in text, text
    assert "does not conform" not in text
    folder.assert_nothing_recorded()


@pytest.mark.long
def test_verdict_line_stands_before_the_sentence_about_a_full_disk(folder: Folder) -> None:
    """If the disk fills during --html, the verdict line and one sentence are printed, and no partial file remains."""
    (folder.path / "p.html").write_text("earlier")
    code, text = folder.run(
        "reference", "--tier", "sizing", "-k", ONE, "--allow-part", "--html", "p.html", most_bytes=12_000
    )
    assert code == 2, text
    line, problem = [one for one in text.splitlines() if one.startswith(("reference", "draftmark"))]
    assert line.startswith("reference has no verdict on draftmark contract") and ": 5 passed, " in line
    assert "p.html was not written: File too large; free space there or name another file" in problem
    assert (folder.path / "p.html").read_text() == "earlier"
    assert [path.name for path in folder.path.iterdir()] == ["p.html"]


def test_whole_file_replaces_the_earlier_one(tmp_path: Path) -> None:
    """A complete output file replaces an earlier one; output to a device such as /dev/full is written directly."""
    path = tmp_path / "v.json"
    path.write_text("earlier")
    assert write_whole(path, "new") == "" and path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
    assert "/dev/full was not written: No space left on device" in write_whole(Path("/dev/full"), "new")


@pytest.mark.long
def test_control_characters_of_a_plugin_are_not_printed(plugin: Plugin) -> None:
    """A plugin's error cannot colour, clear or retitle the terminal; its words are printed."""
    folder = plugin("def act():\n    raise RuntimeError('\\x1b[31mleak\\x1b]0;title\\x07 \\x9b2J end')\n")
    code, text = folder.run("odd", "--tier", "sizing", "-k", ONE)
    assert code == 1 and "leak" in text and " end" in text, text
    assert not {"\x1b", "\x07", "\x9b"} & set(text)


@pytest.mark.long
def test_first_failure_ends_the_run_with_x(plugin: Plugin) -> None:
    """With -x the run ends at the first failed item, and the verdict counts the remaining items as not run."""
    folder = plugin("def act():\n    raise RuntimeError('no')\n")
    code, text = folder.run("odd", "--tier", "sizing", "-k", "supports and not elsewhere", "-x", "--json", "v.json")
    assert code == 1 and "odd does not conform" in text and ", 1 failed; " in text, text
    record = json.loads((folder.path / "v.json").read_text())
    assert record["results"][-1]["outcome"] == "failed" and record["profiles"] == []


def _only_core_sizes(item: Item) -> Outcome | None:
    """Return an item's outcome on a backend that serves only core shapes, and overlap with those shapes."""
    return Outcome.REFUSED if item.needs & SHAPES or item.needs - {Profile.OVERLAP} else None


def test_sizing_items_name_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a host run the verdict does not name a profile that passed items in the sizing tier only."""
    assert Profile.OVERLAP in verdict(_only_core_sizes).profiles
    items = [item for item in all_items() if item.tier is Tier.SIZING or item.needs != {Profile.OVERLAP}]
    assert any(item.needs == {Profile.OVERLAP} for item in items)
    for module in (plugin_subject, verdicts):
        monkeypatch.setattr(
            module, "all_items", lambda tiers=tuple(Tier), backend=None: [one for one in items if one.tier in tiers]
        )
    assert list(verdict(_only_core_sizes).profiles) == [Profile.CORE]
    assert Profile.OVERLAP in verdict(_only_core_sizes, Tier.SIZING).profiles


def test_profile_of_later_tiers_is_called_full_after_all_tiers() -> None:
    """The page calls a profile "served in full" only after a run of all tiers, the device tier included."""
    host, device = page(verdict()), page(verdict(tier=Tier.DEVICE))
    assert "served so far, " in host and "served in full" not in host
    assert "served in full" in device and "served so far, " not in device


LONG = pytest.mark.long


@pytest.mark.parametrize("redirected", [">/dev/full", *(pytest.param(one, marks=LONG) for one in ("| true", ">&-"))])
def test_a_run_that_cannot_print_does_not_fail_the_backend(folder: Folder, redirected: str) -> None:
    """Output to a full disk or a closed pipe gives exit code 2, and a closed stdout the verdict's code.

    Exit code 1 would mean that the backend does not conform.
    """
    run = f"{sys.executable} -m draftmark_tools.cli contract reference"
    command = f"set -o pipefail; {run} -k {ONE} --allow-part {redirected}"
    environment = folder._environment
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder.path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == (0 if redirected == ">&-" else 2), done.stderr
    assert "bug" not in done.stderr and "Traceback" not in done.stderr
