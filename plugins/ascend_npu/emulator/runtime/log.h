// The call log, taken at the C boundary, and the message of the last error.
#pragma once

#include <string>

#include "abi.h"

namespace emulator {

void log_call(const std::string& line);

// Remember why a call fails, and return `status`; torch_npu asks for the text with aclGetRecentErrMsg.
Status fail(Status status, const std::string& why);

// Print and abort: for what must never pass silently.
[[noreturn]] void die(const std::string& why);

}  // namespace emulator
