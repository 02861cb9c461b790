#include "log.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "settings.h"

namespace emulator {

static std::mutex guard;
static bool keeping = settings().log;
static std::string* calls = new std::string;  // never destroyed: threads may log while the process ends
static thread_local std::string recent;
static std::string* last_anywhere = new std::string;

void log_call(const std::string& line) {
    std::lock_guard<std::mutex> lock(guard);
    if (keeping) *calls += line + "\n";
}

Status fail(Status status, const std::string& why) {
    std::string text = "draftmark NPU emulator, error " + std::to_string(status) + ": " + why;
    log_call("error " + why);
    recent = text;
    std::lock_guard<std::mutex> lock(guard);
    *last_anywhere = text;
    return status;
}

void die(const std::string& why) {
    std::fprintf(stderr, "draftmark NPU emulator: %s\n", why.c_str());
    std::fflush(stderr);
    std::abort();
}

}  // namespace emulator

using namespace emulator;

API const char* aclGetRecentErrMsg() {
    static thread_local std::string given;
    std::lock_guard<std::mutex> lock(guard);
    given = recent.empty() ? *last_anywhere : recent;
    recent.clear();
    last_anywhere->clear();
    return given.empty() ? nullptr : given.c_str();
}

API void emulatorKeepLog(int keep) {
    std::lock_guard<std::mutex> lock(guard);
    keeping = keep != 0;
    calls->clear();
}

API const char* emulatorLog() {
    static std::string given;
    std::lock_guard<std::mutex> lock(guard);
    given = *calls;
    return given.c_str();
}

API const char* draftmarkEmulatorVersion() { return "draftmark NPU emulator, not hardware"; }
