// Allocation of device and pinned memory, and synchronous or queued fills of it.
#include <cstring>

#include "capture.h"
#include "log.h"
#include "memory.h"
#include "stream.h"

using namespace emulator;

API Status aclrtMalloc(void** pointer, size_t bytes, int) {
    log_call("aclrtMalloc " + std::to_string(bytes));
    return device_malloc(pointer, bytes);
}

API Status aclrtMallocAlign32(void** pointer, size_t bytes, int policy) { return aclrtMalloc(pointer, bytes, policy); }

// Freeing waits, as on hardware, because the device may still use the memory.
API Status aclrtFree(void* pointer) {
    log_call("aclrtFree");
    if (auto status = synchronize_device(); status != OK) return status;
    return device_free(pointer);
}

API Status aclrtMallocHost(void** pointer, size_t bytes) { return pinned_malloc(pointer, bytes); }
API Status aclrtFreeHost(void* pointer) { return pinned_free(pointer); }

API Status aclrtMemset(void* pointer, size_t, int32_t value, size_t count) {
    log_call("aclrtMemset " + std::to_string(count));
    if (auto* model = strictest_capture()) return refuse(model, "aclrtMemset is a blocking call");
    if (auto why = outside_device(pointer, count); !why.empty()) return fail(PARAM_INVALID, "aclrtMemset: " + why);
    run_now([=] { std::memset(pointer, value, count); });
    return OK;
}

API Status aclrtMemsetAsync(void* pointer, size_t, int32_t value, size_t count, Stream* stream) {
    log_call("aclrtMemsetAsync " + std::to_string(count));
    if (auto why = outside_device(pointer, count); !why.empty()) return fail(PARAM_INVALID, "aclrtMemsetAsync: " + why);
    return submit(stream, {"aclrtMemsetAsync", [=] {
                               std::memset(pointer, value, count);
                               return Step::Done;
                           }});
}

struct PointerAttributes {  // aclrtPtrAttributes: location of the memory, then its page size
    uint32_t id;
    uint32_t type;
    uint32_t page_size;
    uint32_t reserved[4];
};

API Status aclrtPointerGetAttributes(const void* pointer, PointerAttributes* out) {
    *out = {};
    out->type = is_device(pointer) ? 1 : is_pinned(pointer) ? 0 : 2;
    return OK;
}

API const char* emulatorBrokenFence() {
    static std::string text;
    text = broken_fence();
    return text.c_str();
}

API size_t emulatorDeviceBytes() { return device_bytes_used(); }
