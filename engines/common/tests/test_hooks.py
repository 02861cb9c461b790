"""Tests of the warning about a hook that an engine does not offer."""

from __future__ import annotations

import logging

import pytest

from draftmark_engines import warn_missing_hook


def test_a_missing_hook_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A process logs one warning for each missing hook, with the engine and the consequence."""
    warn_missing_hook.cache_clear()
    with caplog.at_level(logging.WARNING, "draftmark_engines"):
        for hook in ("Builder.build", "Builder.update", "Builder.build"):
            warn_missing_hook("an engine", hook, "steps are slower")
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("WARNING", "an engine does not call Builder.build, so steps are slower"),
        ("WARNING", "an engine does not call Builder.update, so steps are slower"),
    ]
