// Two-phase operators: …GetWorkspaceSize checks rules and prepares the work; the second call enqueues it on a stream.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tensor.h"

namespace emulator {

using Work = std::function<void()>;

struct Operands {
    std::vector<std::pair<void*, size_t>> ranges;  // memory that the operator may touch
    std::vector<at::ScalarType> dtypes;            // data types of its tensors, in the order of its arguments
};

}  // namespace emulator

struct aclOpExecutor {
    std::string name;
    emulator::Work work;
    emulator::Operands operands;
    uint64_t workspace = 0;
};

namespace emulator {

struct Stream;

// Record a tensor's memory for the operator that this thread prepares.
void touched(const aclTensor& tensor);

// Set the scratch memory of the operator that this thread prepares; the default is none.
void needs_workspace(uint64_t bytes);

// Raised by a rule when the operator rejects its arguments. The text has the reason and its source.
struct Rejected : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline void rule(bool holds, const std::string& sentence) {
    if (!holds) throw Rejected(sentence);
}

int prepare(const char* name, uint64_t* size, aclOpExecutor** executor, const std::function<Work()>& make);
int launch(const char* name, void* workspace, uint64_t size, aclOpExecutor* executor, Stream* stream);

// Work that computes `value` and stores it in `out` with a dtype conversion, as the device's kernels do.
Work into(const aclTensor* out, std::function<at::Tensor()> value);

}  // namespace emulator

#define EMULATOR_UNPACK(...) __VA_ARGS__

// ACLNN(aclnnNeg, (aclTensor* self, aclTensor* out), { return into(out, [a = T(self)] { return a.neg(); }); })
#define ACLNN(NAME, PARAMETERS, ...)                                                                                    \
    API int NAME##GetWorkspaceSize(EMULATOR_UNPACK PARAMETERS, uint64_t* emu_size, aclOpExecutor** emu_executor) {      \
        return emulator::prepare(#NAME, emu_size, emu_executor, [&]() -> emulator::Work __VA_ARGS__);                   \
    }                                                                                                                   \
    API int NAME(void* workspace, uint64_t size, aclOpExecutor* executor, emulator::Stream* stream) {                   \
        return emulator::launch(#NAME, workspace, size, executor, stream);                                              \
    }
