// Operators that an A2 or A3 runs on its AICPU, which is slow and cannot be captured.
#pragma once

#include <string>
#include <vector>

#include "tensor.h"

namespace emulator {

bool runs_on_aicpu(const std::string& name, const std::vector<at::ScalarType>& dtypes);

}  // namespace emulator
