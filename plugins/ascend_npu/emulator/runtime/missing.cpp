// Target of the generated stubs: a vendor function that the emulator lacks.
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "log.h"

static std::mutex guard;
static auto& absent = *new std::string;

// torch_npu's log. With ASCEND_GLOBAL_LOG_LEVEL=2 it has a warning with the missing operator, before torch_npu falls
// back to the functions below.
API void aclAppLog(int, const char*, const char*, uint32_t, const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (std::strstr(text, "GetWorkspaceSize not in") == nullptr) return;
    std::lock_guard<std::mutex> lock(guard);
    absent = text;
}

static std::string hint() {
    std::lock_guard<std::mutex> lock(guard);
    return absent.empty() ? "; set ASCEND_GLOBAL_LOG_LEVEL=2 to see which operator is missing" : "; " + absent;
}

API void emulatorMissing(const char* name) {
    emulator::die(std::string(name) + " was called, but is not emulated" + hint());
}

// Operators of the interface before aclnn. torch_npu falls back to them if libopapi lacks an operator.
API int aclopCompileAndExecute(const char* operation, ...) {
    emulator::die(std::string("operator ") + operation + " was called as an aclop, and is not emulated" + hint());
}

API int aclopCompileAndExecuteV2(const char* operation, ...) {
    emulator::die(std::string("operator ") + operation + " was called as an aclop, and is not emulated" + hint());
}
