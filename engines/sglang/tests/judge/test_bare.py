"""What a probe says of a name that it does not find in a release."""

from __future__ import annotations

import pytest

from draftmark_contract.judge.item import NotAsked
from draftmark_sglang.judge.probes import bare


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ModuleNotFoundError("no orjson", name="orjson"), "SGLang imports orjson, which is not installed here"),
        (ModuleNotFoundError("No module named 'a.b'", name="a.b"), "SGLang imports a.b, which is not installed here"),
        (ModuleNotFoundError("…", name="sglang.srt.gone"), "this release has no sglang.srt.gone, where Name is"),
        (ImportError("cannot import name 'x'"), "this release has no sglang.srt.gone.Name: cannot import name 'x'"),
    ],
)
def test_a_missing_requirement_is_no_fault_of_the_release(
    error: Exception, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that SGLang imports and that is not installed is named, with the way out; else the release lacks it."""

    def import_module(name: str) -> None:
        raise error

    monkeypatch.setattr(bare.importlib, "import_module", import_module)
    with pytest.raises(NotAsked) as raised:
        bare.member("srt.gone", "Name")
    assert str(raised.value).startswith(says)
