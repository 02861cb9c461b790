"""Tests of the error that a probe raises when the installed SGLang release lacks a name."""

from __future__ import annotations

import pytest

from draftmark_contract.check import Unjudged
from draftmark_sglang_judge.probes import bare


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ModuleNotFoundError("no orjson", name="orjson"), "SGLang imports orjson, which is not installed; pip"),
        (ModuleNotFoundError("No module named 'a.b'", name="a.b"), "SGLang imports a.b, which is not installed; pip"),
        (ModuleNotFoundError("…", name="sglang.srt.gone"), "this release has no module sglang.srt.gone, which should"),
        (ImportError("cannot import name 'x'"), "this release has no sglang.srt.gone.Name: cannot import name 'x'"),
    ],
)
def test_missing_package_is_not_a_missing_name(error: Exception, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error states that a package is not installed, with the pip command, or that the release lacks a name."""

    def import_module(name: str) -> None:
        raise error

    monkeypatch.setattr(bare.importlib, "import_module", import_module)
    with pytest.raises(Unjudged) as raised:
        bare.member("srt.gone", "Name")
    assert str(raised.value).startswith(says)
