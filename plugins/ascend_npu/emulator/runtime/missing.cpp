// Where the generated stubs end: a function of the vendor's that the emulator does not have.
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "log.h"

static std::mutex guard;
static auto& absent = *new std::string;

// torch_npu's own log, where ASCEND_GLOBAL_LOG_LEVEL=2 lets warnings through: it says which operator it did not find
// before it falls back to the functions below.
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
    emulator::die(std::string(name) + " was called, and is not emulated; nothing silently succeeds" + hint());
}

// The operators of before aclnn. torch_npu falls back to them when libopapi lacks an operator.
API int aclopCompileAndExecute(const char* operation, ...) {
    emulator::die(std::string("operator ") + operation + " was called as an aclop, and is not emulated" + hint());
}

API int aclopCompileAndExecuteV2(const char* operation, ...) {
    emulator::die(std::string("operator ") + operation + " was called as an aclop, and is not emulated" + hint());
}
