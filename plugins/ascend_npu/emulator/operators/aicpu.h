// Which operators an A2 or A3 runs on its AICPU: slow there, and nothing for a captured graph.
#pragma once

#include <string>
#include <vector>

#include "tensor.h"

namespace emulator {

bool runs_on_aicpu(const std::string& name, const std::vector<at::ScalarType>& dtypes);

}  // namespace emulator
