// The part of the C interface that torch_npu calls, declared from public sources: the vendor's operator and runtime
// pages, torch_npu's BSD sources, and the undefined symbols of its wheel. No vendor header is used.
#pragma once

#include <cstddef>
#include <cstdint>

#define API extern "C" __attribute__((visibility("default")))

namespace emulator {

using Status = int;  // aclError

constexpr Status OK = 0;
constexpr Status PARAM_INVALID = 107000;   // ACL_ERROR_RT_PARAM_INVALID
constexpr Status NO_DEVICE = 107002;       // ACL_ERROR_RT_CONTEXT_NULL, from aclrtGetDevice before aclrtSetDevice
constexpr Status STREAM_CAPTURED = 107025; // the call is not permitted while a stream captures
constexpr Status OUT_OF_MEMORY = 207001;   // ACL_ERROR_RT_MEMORY_ALLOCATION
constexpr Status OPERATOR_REJECTED = 161002;  // ACLNN_ERR_PARAM_INVALID, from a …GetWorkspaceSize
constexpr Status OPERATOR_FAILED = 507015;    // ACL_ERROR_RT_AICORE_EXCEPTION, reported at the next synchronisation
constexpr Status DEADLOCK = 507046;           // ACL_ERROR_RT_STREAM_SYNC_TIMEOUT

enum class Copy { HostToHost = 0, HostToDevice = 1, DeviceToHost = 2, DeviceToDevice = 3, Default = 4 };

enum class Until { AtLeast = 0, Equal = 1, AnyBit = 2, NotAllBits = 3 };  // aclrtValueWait's conditions

}  // namespace emulator
