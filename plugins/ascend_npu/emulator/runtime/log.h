// Call log of the C interface, and the message of the last error.
#pragma once

#include <string>

#include "abi.h"

namespace emulator {

void log_call(const std::string& line);

// Store the reason of a failure and return `status`; torch_npu reads the text with aclGetRecentErrMsg.
Status fail(Status status, const std::string& why);

// Print and abort, for errors that must never pass silently.
[[noreturn]] void die(const std::string& why);

}  // namespace emulator
