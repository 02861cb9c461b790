#include "memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>

#include "log.h"
#include "settings.h"

namespace emulator {

static std::mutex guard;
static auto& device = *new std::map<uintptr_t, size_t>;
static auto& pinned = *new std::map<uintptr_t, size_t>;
static size_t used = 0;

static std::map<uintptr_t, size_t>::iterator range_of(std::map<uintptr_t, size_t>& ranges, uintptr_t address) {
    auto next = ranges.upper_bound(address);
    if (next == ranges.begin()) return ranges.end();
    auto found = std::prev(next);
    return address < found->first + found->second ? found : ranges.end();
}

static size_t mapped(size_t bytes) { return (bytes + 4095) / 4096 * 4096 + 2 * FENCE_BYTES; }

static size_t slack(size_t bytes) { return (bytes + 4095) / 4096 * 4096 - bytes + FENCE_BYTES; }

Status device_malloc(void** pointer, size_t bytes) {
    std::lock_guard<std::mutex> lock(guard);
    if (pointer == nullptr || bytes == 0) return fail(PARAM_INVALID, "aclrtMalloc of 0 bytes");
    if (used + bytes > settings().hbm_bytes) {
        std::ostringstream why;
        why << "out of HBM: " << bytes << " bytes requested, " << used << " of " << settings().hbm_bytes << " in use";
        return fail(OUT_OF_MEMORY, why.str());
    }
    void* base = mmap(nullptr, mapped(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return fail(OUT_OF_MEMORY, "the host has no memory left for the emulated device");
    auto start = reinterpret_cast<uintptr_t>(base) + FENCE_BYTES;
    std::memset(base, FENCE, FENCE_BYTES);
    if (bytes <= POISON_BYTES) std::memset(reinterpret_cast<void*>(start), POISON, bytes);
    std::memset(reinterpret_cast<void*>(start + bytes), FENCE, slack(bytes));
    device[start] = bytes;
    used += bytes;
    *pointer = reinterpret_cast<void*>(start);
    return OK;
}

static std::string fence_of(uintptr_t start, size_t bytes) {
    auto intact = [](const unsigned char* at, size_t count) {
        for (size_t i = 0; i < count; ++i)
            if (at[i] != FENCE) return false;
        return true;
    };
    auto at = reinterpret_cast<const unsigned char*>(start);
    if (intact(at - FENCE_BYTES, FENCE_BYTES) && intact(at + bytes, slack(bytes))) return "";
    std::ostringstream text;
    text << "memory around the device allocation of " << bytes << " bytes at 0x" << std::hex << start << " was written";
    return text.str();
}

Status device_free(void* pointer) {
    std::lock_guard<std::mutex> lock(guard);
    auto found = device.find(reinterpret_cast<uintptr_t>(pointer));
    if (found == device.end()) return fail(PARAM_INVALID, "aclrtFree of memory that is not from aclrtMalloc");
    auto [start, bytes] = *found;
    if (auto why = fence_of(start, bytes); !why.empty()) die(why);
    munmap(reinterpret_cast<void*>(start - FENCE_BYTES), mapped(bytes));
    used -= bytes;
    device.erase(found);
    return OK;
}

Status pinned_malloc(void** pointer, size_t bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 4096, bytes == 0 ? 1 : bytes) != 0) return fail(OUT_OF_MEMORY, "no host memory left");
    std::memset(memory, POISON, bytes);
    std::lock_guard<std::mutex> lock(guard);
    pinned[reinterpret_cast<uintptr_t>(memory)] = bytes;
    *pointer = memory;
    return OK;
}

Status pinned_free(void* pointer) {
    std::lock_guard<std::mutex> lock(guard);
    if (pinned.erase(reinterpret_cast<uintptr_t>(pointer)) == 0)
        return fail(PARAM_INVALID, "aclrtFreeHost of memory that is not from aclrtMallocHost");
    std::free(pointer);
    return OK;
}

bool is_pinned(const void* pointer) {
    std::lock_guard<std::mutex> lock(guard);
    return range_of(pinned, reinterpret_cast<uintptr_t>(pointer)) != pinned.end();
}

bool is_device(const void* pointer) {
    std::lock_guard<std::mutex> lock(guard);
    return range_of(device, reinterpret_cast<uintptr_t>(pointer)) != device.end();
}

std::string outside_device(const void* pointer, size_t bytes) {
    std::lock_guard<std::mutex> lock(guard);
    auto start = reinterpret_cast<uintptr_t>(pointer);
    auto found = range_of(device, start);
    if (found != device.end() && start + bytes <= found->first + found->second) return "";
    std::ostringstream text;
    text << bytes << " bytes at 0x" << std::hex << start << std::dec;
    if (found == device.end()) text << " are not in device memory (freed, or of the host)";
    else text << " pass the end of their allocation of " << found->second << " bytes";
    return text.str();
}

std::string broken_fence() {
    std::lock_guard<std::mutex> lock(guard);
    for (auto [start, bytes] : device)
        if (auto why = fence_of(start, bytes); !why.empty()) return why;
    return "";
}

size_t device_bytes_used() {
    std::lock_guard<std::mutex> lock(guard);
    return used;
}

}  // namespace emulator
