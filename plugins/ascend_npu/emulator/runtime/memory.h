// Device memory is host memory that we hand out, poison and fence. Pinned memory is what aclrtMallocHost gave.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "abi.h"

namespace emulator {

constexpr unsigned char POISON = 0xFF;  // NaN in every floating-point format, -1 in every signed integer
constexpr size_t POISON_BYTES = size_t(1) << 30;  // larger allocations stay untouched: a sparse one must not fill the host
constexpr unsigned char FENCE = 0xA5;
constexpr size_t FENCE_BYTES = 4096;

Status device_malloc(void** pointer, size_t bytes);
Status device_free(void* pointer);
Status pinned_malloc(void** pointer, size_t bytes);
Status pinned_free(void* pointer);

bool is_pinned(const void* pointer);
bool is_device(const void* pointer);

// Empty when [pointer, pointer + bytes) lies in one live device allocation, else a sentence.
std::string outside_device(const void* pointer, size_t bytes);

// Empty, or which allocation's fence was overwritten. Looks at all of them.
std::string broken_fence();

size_t device_bytes_used();

}  // namespace emulator
