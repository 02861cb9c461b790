"""A fence marks the stream of its own device, whichever device is torch's current one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from draftmark import transfer


def test_fence_marks_the_stream_of_its_device(monkeypatch):
    """On a device that is not torch's current one, the event is recorded on that device's current stream."""
    calls: list[Any] = []

    class Event:
        def record(self, stream: object = "stream of the current device") -> None:
            calls.append(stream)

        def synchronize(self) -> None:
            calls.append("waits")

    module = SimpleNamespace(Event=Event, current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(transfer, "present_device", lambda _, device: torch.device(device))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    made = transfer.fence("cuda:1")
    made.record()
    made.synchronize()
    assert calls == ["stream of cuda:1", "waits"]
