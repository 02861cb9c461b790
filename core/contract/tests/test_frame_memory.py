"""Tests of the errors that mean that memory ran out, which end a run without a verdict."""

from __future__ import annotations

import pytest
import torch

from draftmark_contract.runner.resources import exhausted
from draftmark_contract.runner.stopped import MemoryRanOut

OF_CUDA = (
    "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the documentation for more information.\n"
    "CUDA kernel errors might be asynchronously reported at some other API call."
)
HALF_FREE = "CUDA out of memory. Tried to allocate 70.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.5 GiB"
TOO_LARGE = HALF_FREE.replace("70.00 GiB", "256.00 GiB")
OF_NPU = "NPU out of memory. Tried to allocate 52.00 MiB (NPU 0; 60.96 GiB total capacity; 59.36 GiB already allocated"
DEVICE_MESSAGES = {
    "driver": OF_CUDA,
    "torch": HALF_FREE,
    "torch-driver": "CUDA driver error: out of memory",
    "triton": "Triton Error [CUDA]: out of memory",
    "cuda-python": "CUDA call failed: CUDA_ERROR_OUT_OF_MEMORY",
    "result-2": "cuLaunchKernelEx: CUresult 2",
    "hip": "HIP error: out of memory",
    "hip-torch": "HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 191.98 GiB",
    "triton-hip": "Triton Error [HIP]:  Code: 2, Messsage: out of memory",
    "npu": OF_NPU,
    "cann": "NPU function error: call aclnnMatmul failed, error code is 207001",
    "cann-text": "AclrtMalloc failed\nEL0004: [PID: 316198] Failed to allocate memory.",
}
OTHER_MESSAGES = {
    "illegal": "CUDA error: an illegal memory access was encountered",
    "launch": "CUDA error: too many resources requested for launch",
    "result-700": "cuLaunchKernelEx: CUresult 700",
    "result-201": "cuLaunchKernelEx: CUresult 201",
    "shared": "Triton Error [CUDA]: invalid argument; out of resource: shared memory, Required: 278528",
    "npu-fault": "ACL stream synchronize failed, error code is 507015",
    "too-large": TOO_LARGE,
    "too-large-npu": OF_NPU.replace("52.00 MiB", "61.00 GiB"),
    "words": "the pool is out of memory pages",
}


@pytest.mark.parametrize("message", DEVICE_MESSAGES.values(), ids=DEVICE_MESSAGES)
def test_a_device_without_memory_is_recognised(message: str) -> None:
    """Each runtime's message means that memory ran out, also as the cause of another error."""
    error = RuntimeError(message)
    assert isinstance(exhausted(error, "check[case]"), MemoryRanOut)
    outer = ValueError("attend failed")
    outer.__cause__ = error
    assert message.partition("\n")[0][:100] in str(exhausted(outer, "check[case]"))


@pytest.mark.parametrize("message", OTHER_MESSAGES.values(), ids=OTHER_MESSAGES)
def test_other_errors_of_a_device_are_the_backends(message: str) -> None:
    """These remain failures of the backend: an illegal access, a refused launch, a request above its memory."""
    assert exhausted(RuntimeError(message), "check[case]") is None
    if "Tried to allocate" in message:
        assert exhausted(torch.OutOfMemoryError(message), "check[case]") is None


def test_classes_of_torch_are_recognised() -> None:
    """torch raises an AcceleratorError for the driver, and an OutOfMemoryError for its own allocator."""
    accelerator = getattr(torch, "AcceleratorError", RuntimeError)
    for error in (accelerator(OF_CUDA), torch.OutOfMemoryError(HALF_FREE), torch.OutOfMemoryError("out of memory")):
        assert isinstance(exhausted(error, "check[case]"), MemoryRanOut)
    assert exhausted(accelerator(OTHER_MESSAGES["illegal"]), "check[case]") is None
    assert exhausted(AssertionError(OF_CUDA), "check[case]") is None, "a check's own message may quote an error"
