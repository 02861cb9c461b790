// Device memory: host memory with poison and fences. Pinned memory: memory from aclrtMallocHost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "abi.h"

namespace emulator {

constexpr unsigned char POISON = 0xFF;  // NaN in every floating-point format, -1 in every signed integer
constexpr size_t POISON_BYTES = size_t(1) << 30;  // larger allocations are not poisoned: a sparse one must not fill the host
constexpr unsigned char FENCE = 0xA5;
constexpr size_t FENCE_BYTES = 4096;

Status device_malloc(void** pointer, size_t bytes);
Status device_free(void* pointer);
Status pinned_malloc(void** pointer, size_t bytes);
Status pinned_free(void* pointer);

bool is_pinned(const void* pointer);
bool is_device(const void* pointer);

// An empty string if [pointer, pointer + bytes) lies in one live device allocation, else the error.
std::string outside_device(const void* pointer, size_t bytes);

// Checks all fences. Returns an empty string, or the allocation with an overwritten fence.
std::string broken_fence();

size_t device_bytes_used();

}  // namespace emulator
