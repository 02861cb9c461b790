// Copies. A pinned source is read when the copy runs, not when it is enqueued, so that early overwriting shows.
#include <cstring>
#include <vector>

#include "capture.h"
#include "log.h"
#include "machine.h"
#include "memory.h"

using namespace emulator;

static const char* kind_name(Copy kind) {
    switch (kind) {
        case Copy::HostToDevice: return "host to device";
        case Copy::DeviceToHost: return "device to host";
        case Copy::DeviceToDevice: return "device to device";
        default: return "host to host";
    }
}

static Copy resolve(Copy kind, const void* target, const void* source) {
    if (kind != Copy::Default) return kind;
    if (is_device(target)) return is_device(source) ? Copy::DeviceToDevice : Copy::HostToDevice;
    return is_device(source) ? Copy::DeviceToHost : Copy::HostToHost;
}

// Error of a source or target in the wrong memory; empty if both are right.
static std::string misplaced(Copy kind, void* target, size_t room, const void* source, size_t bytes) {
    if (bytes > room) return "the target holds " + std::to_string(room) + " bytes, fewer than the " + std::to_string(bytes) + " to copy";
    bool to_device = kind == Copy::HostToDevice || kind == Copy::DeviceToDevice;
    bool from_device = kind == Copy::DeviceToHost || kind == Copy::DeviceToDevice;
    if (to_device)
        if (auto why = outside_device(target, bytes); !why.empty()) return "the target's " + why;
    if (from_device)
        if (auto why = outside_device(source, bytes); !why.empty()) return "the source's " + why;
    return "";
}

API Status aclrtMemcpy(void* target, size_t room, const void* source, size_t bytes, Copy kind) {
    kind = resolve(kind, target, source);
    log_call(std::string("aclrtMemcpy ") + kind_name(kind) + " " + std::to_string(bytes));
    std::lock_guard<std::recursive_mutex> lock(machine().lock);
    if (auto* model = strictest_capture())
        return refuse(model, std::string("a blocking copy (aclrtMemcpy, ") + kind_name(kind) + ")");
    if (auto why = misplaced(kind, target, room, source, bytes); !why.empty()) return fail(PARAM_INVALID, "aclrtMemcpy: " + why);
    run_now([=] { std::memmove(target, source, bytes); });
    return OK;
}

static Task copy_task(void* target, const void* source, size_t bytes, Copy kind) {
    return {std::string("aclrtMemcpyAsync ") + kind_name(kind), [=] {
                std::memmove(target, source, bytes);
                return Step::Done;
            }};
}

static Task staged_task(void* target, const void* source, size_t bytes) {
    auto start = static_cast<const char*>(source);
    auto staged = std::make_shared<std::vector<char>>(start, start + bytes);
    return {"aclrtMemcpyAsync host to device, pageable", [=] {
                std::memcpy(target, staged->data(), bytes);
                return Step::Done;
            }};
}

API Status aclrtMemcpyAsync(void* target, size_t room, const void* source, size_t bytes, Copy kind, Stream* stream) {
    kind = resolve(kind, target, source);
    log_call(std::string("aclrtMemcpyAsync ") + kind_name(kind) + " " + std::to_string(bytes));
    if (stream == nullptr) stream = default_stream();
    if (auto why = misplaced(kind, target, room, source, bytes); !why.empty()) return fail(PARAM_INVALID, "aclrtMemcpyAsync: " + why);
    const void* host = kind == Copy::HostToDevice ? source : kind == Copy::DeviceToHost ? target : nullptr;
    if (host == nullptr || is_pinned(host)) return submit(stream, copy_task(target, source, bytes, kind));
    if (stream->capturing != nullptr)
        return refuse(stream->capturing, std::string("an asynchronous copy ") + kind_name(kind) + " with pageable host memory");
    if (kind == Copy::HostToDevice) return submit(stream, staged_task(target, source, bytes));
    if (auto status = submit(stream, copy_task(target, source, bytes, kind)); status != OK) return status;
    return synchronize(stream);  // pageable memory may be freed before a lazy stream reads it
}
