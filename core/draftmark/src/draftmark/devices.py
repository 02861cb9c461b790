"""Whether a device is there; the one place that asks torch for hardware on behalf of a backend."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import BackendLoadError, LoadFailure
from .geometry import DeviceProfile

if TYPE_CHECKING:
    import torch

    from .hookspecs import BackendInfo


def require_device(name: str, info: BackendInfo, device: torch.device | str) -> None:
    """Raise `BackendLoadError` unless `device` exists and is of the kind that the backend runs on."""
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
            f"run on a machine with one, with a torch build for {kind}",
        )


def is_present(kind: str) -> bool:
    """Whether torch sees a device of that type."""
    import torch

    module = getattr(torch, kind, None)
    return kind == "cpu" or (module is not None and module.is_available())


def import_device_type(name: str, info: BackendInfo) -> None:
    """Import the vendor runtime where it is what teaches torch the backend's device type, as torch_npu does for npu.

    Raises:
        BackendLoadError: the runtime is installed and does not import, for want of its vendor's libraries, say.
    """
    try:
        import torch

        torch.device("cpu" if info.device == "any" else info.device)
    except ImportError:
        return  # `require_device` says what breaks torch itself
    except RuntimeError:
        try:
            for module in info.runtime:
                importlib.import_module(module)
        except (ImportError, OSError) as error:
            raise BackendLoadError(
                name,
                LoadFailure.RUNTIME_ABSENT,
                f"its runtime does not import: {type(error).__name__}: {error}",
                info.install or "install the vendor's libraries",
            ) from error


def _kind(name: str, device: torch.device | str) -> str:
    try:
        import torch

        return torch.device(device).type
    except ImportError as error:
        # torch-npu without its vendor libraries breaks `import torch` itself.
        raise BackendLoadError(
            name,
            LoadFailure.RUNTIME_ABSENT,
            f"import torch raised {type(error).__name__}: {error}",
            "install torch (pip install draftmark[torch]); with torch-npu and no CANN, set "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        ) from error
    except (RuntimeError, TypeError):
        raise BackendLoadError(
            name,
            LoadFailure.DEVICE_ABSENT,
            f"torch knows no device {str(device)!r}",
            "name one that torch has, such as cpu, cuda or cuda:1",
        ) from None


def device_profile(device: torch.device | str) -> DeviceProfile:
    """Describe a device at hand for `Geometry.create`."""
    import torch

    device = torch.device(device)
    if device.type == "npu":
        npu: Any = torch.get_device_module(device)
        return DeviceProfile("npu", num_sms=max(1, npu.get_device_properties(device).cube_core_num))
    if device.type != "cuda":
        return DeviceProfile(kind=device.type, num_sms=max(1, torch.get_num_threads()))
    properties = torch.cuda.get_device_properties(device)
    return DeviceProfile("cuda", properties.major * 10 + properties.minor, properties.multi_processor_count)


def synchronize(device: torch.device | str) -> None:
    """Wait until `device` has done all that was enqueued on it, on any stream; at once on a CPU that is not late."""
    import torch

    from .graphs import late_device

    device, late = torch.device(device), late_device()
    if late is not None and device.type == "cpu":
        late.wait("synchronize")
    torch.get_device_module(device).synchronize(device)
