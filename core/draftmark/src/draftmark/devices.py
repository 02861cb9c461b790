"""Presence, properties and synchronization of devices."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import BackendLoadError, BufferError, LoadFailure
from .geometry import DeviceProfile

if TYPE_CHECKING:
    import torch

    from .backend_info import BackendInfo


def require_device(name: str, info: BackendInfo, device: torch.device | str) -> None:
    """Raise `BackendLoadError` unless `device` is present and has a type that the backend runs on."""
    kind = _kind(name, device)
    allowed = {kind} if info.device == "any" else {info.device} | ({"cpu"} if info.host_kernels else set())
    if kind not in allowed:
        raise BackendLoadError(
            name,
            LoadFailure.DEVICE_ABSENT,
            f"it runs on {' or '.join(sorted(allowed))}, not on {kind}",
            f"pass a {info.device} device, or choose a backend for {kind} (`draftmark list`)",
        )
    if not is_present(kind):
        raise BackendLoadError(
            name,
            LoadFailure.DEVICE_ABSENT,
            f"torch sees no {kind} device",
            f"run on a machine that has one, with a torch build for {kind}",
        )


def is_present(kind: str) -> bool:
    """Return True if torch sees a device of type `kind`."""
    import torch

    module = getattr(torch, kind, None)
    return kind == "cpu" or (module is not None and module.is_available())


def present_device(owner: str, device: torch.device | str) -> torch.device:
    """Return `device` as torch's object.

    Raises:
        BufferError: the name is not a torch device, or no device of that type is present. `owner` is the tensors'
            owner in the message.
    """
    import torch

    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise BufferError(
            f"{owner}'s device is {device!r}, but torch has no such device; name a device such as cpu or cuda:1"
        ) from None
    if not is_present(found.type):
        raise BufferError(
            f"{owner}'s device is {str(device)!r}, but torch sees no {found.type} device; allocate on the CPU"
        )
    return found


def import_device_type(name: str, info: BackendInfo) -> None:
    """Import the vendor packages when torch needs them to register the device type, e.g. torch_npu for npu.

    Raises:
        BackendLoadError: a vendor package is installed but its import fails, e.g. because vendor libraries are missing.
    """
    try:
        import torch

        torch.device("cpu" if info.device == "any" else info.device)
    except ImportError:
        return  # torch itself fails to import; return, because `require_device` raises the error for it
    except RuntimeError:
        try:
            for module in info.runtime:
                importlib.import_module(module)
        except (ImportError, OSError) as error:
            raise BackendLoadError(
                name,
                LoadFailure.RUNTIME_ABSENT,
                f"importing its runtime raised {type(error).__name__}: {error}",
                info.install or "install the vendor's libraries",
            ) from error


def _kind(name: str, device: torch.device | str) -> str:
    try:
        import torch

        return torch.device(device).type
    except ImportError as error:
        # With torch-npu installed but without CANN, `import torch` itself fails.
        raise BackendLoadError(
            name,
            LoadFailure.RUNTIME_ABSENT,
            f"import torch raised {type(error).__name__}: {error}",
            "install torch (pip install draftmark[torch]); with torch-npu but without CANN, set "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        ) from error
    except (RuntimeError, TypeError):
        raise BackendLoadError(
            name,
            LoadFailure.DEVICE_ABSENT,
            f"torch has no device {str(device)!r}",
            "name a device that torch has, such as cpu, cuda or cuda:1",
        ) from None


def device_profile(device: torch.device | str) -> DeviceProfile:
    """Return kind, architecture and number of SMs of a device, for `Geometry.create`. Reads the driver.

    Raises:
        BufferError: `device` is not present.
    """
    import torch

    device = present_device("a device profile", device)
    if device.type == "npu":
        npu: Any = torch.get_device_module(device)
        return DeviceProfile("npu", num_sms=max(1, npu.get_device_properties(device).cube_core_num))
    if device.type != "cuda":
        return DeviceProfile(kind=device.type, num_sms=max(1, torch.get_num_threads()))
    properties = torch.cuda.get_device_properties(device)
    return DeviceProfile("cuda", properties.major * 10 + properties.minor, properties.multi_processor_count)


def synchronize(device: torch.device | str) -> None:
    """Wait until all work enqueued on `device`, on any stream, is done. Returns at once on an ordinary CPU."""
    import torch

    from .graphs.active import late_device

    device, late = torch.device(device), late_device()
    if late is not None and device.type == "cpu":
        late.wait("synchronize")
    torch.get_device_module(device).synchronize(device)
