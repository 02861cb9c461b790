"""Tests that tools/environments.toml describes every environment, and that each lock file fits its description."""

from __future__ import annotations

import re
import tomllib

import pytest

from tools import environments

NAMES = list(tomllib.loads(environments.DATA.read_text()))


def name_of(requirement: str) -> str:
    """Return the normalised name of a requirement."""
    return re.sub(r"[-_.]+", "-", re.split(r"[=<>\[; ]", requirement)[0]).lower()


@pytest.mark.parametrize("name", NAMES)
def test_a_lock_has_every_requirement_with_hashes(name):
    """A lock has every requirement, each with hashes, and the pinned version if a requirement pins one."""
    one = environments.read(name)
    text = one.lock.read_text()
    blocks = re.findall(r"^(\S+?)==(\S+)[^\n]*((?:\n    --hash=sha256:[0-9a-f]{64}[ \\]*)+)", text, re.MULTILINE)
    locked = {}
    for package, version, _ in blocks:
        locked.setdefault(name_of(package), set()).add(version)
    lines = [line for line in text.splitlines() if re.match(r"[A-Za-z]", line)]
    assert len(lines) == len(blocks)
    for requirement in (*one.requirements, *one.bare):
        assert name_of(requirement) in locked, requirement
        if "==" in requirement:
            assert requirement.split("==")[1] in locked[name_of(requirement)]
    assert not [package for package in locked if environments.UNLOCKED.fullmatch(package)]


def test_constraints_and_locks_have_one_version_of_each_package():
    """constraints.txt (for `pip install -c`) and the lock of the test environment have equal versions."""
    text = environments.read("dev").lock.read_text()
    for line in environments.CONSTRAINTS.read_text().splitlines():
        package, _, version = line.partition("==")
        if version and not environments.UNLOCKED.fullmatch(package):
            assert f"\n{name_of(package)}=={version} " in text, line


def test_an_environment_in_the_same_folder_adds_to_what_it_extends():
    """The environment "dev" contains "demo", which it extends; "npu-newest" differs from "npu" only in versions."""
    demo, dev = environments.read("demo"), environments.read("dev")
    assert dev.folder == demo.folder and dev.local[: len(demo.local)] == demo.local
    npu, newest = environments.read("npu"), environments.read("npu-newest")
    assert npu.folder != newest.folder and npu.local == newest.local
    assert {name_of(one) for one in npu.requirements} == {name_of(one) for one in newest.requirements}


@pytest.mark.parametrize("name", NAMES)
def test_every_folder_of_the_repository_that_is_named_exists(name):
    """Every folder in environments.toml exists, so a renamed folder is found before any environment is built."""
    one = environments.read(name)
    words = [word for line in one.test for word in line.split() if "/" in word and "{" not in word]
    for place in (*one.local, *one.path, *words):
        assert (environments.ROOT / place).exists(), place


def test_an_unknown_name_is_one_sentence():
    """An unknown environment name gives one sentence that lists the existing names."""
    with pytest.raises(environments.EnvironmentFailed, match=r"no environment is named vlm; .* has demo, dev"):
        environments.read("vlm")


def test_make_installs_again_only_after_a_change(tmp_path, monkeypatch):
    """An environment is installed again only if its lock changed or the last installation failed."""
    steps = []
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    monkeypatch.setattr(environments, "LOCKS", tmp_path)
    monkeypatch.setattr(environments.venv, "create", lambda home, with_pip: home.mkdir(exist_ok=True))
    monkeypatch.setattr(environments, "run", lambda *command: steps.append(command) or len(steps) != 2)
    one = environments.Environment("one", ".one", requirements=("a",))
    one.lock.write_text("a==1")
    environments.make(one)
    environments.make(one)
    assert len(steps) == 1
    one.lock.write_text("a==2")
    with pytest.raises(environments.EnvironmentFailed, match=r"\.one is not complete: pip could not install"):
        environments.make(one)
    environments.make(one)
    assert len(steps) == 3


def test_an_optional_environment_that_cannot_be_had_is_named(monkeypatch, capsys):
    """If an optional environment's packages are unavailable, its test passes and a line names the missing package."""
    monkeypatch.setattr(environments, "can_be_had", lambda one: False)
    assert environments.test(environments.read("sglang"))
    assert "sglang was not run: pip finds no torch==2.13.0+cpu" in capsys.readouterr().out
