#include "aicpu.h"

#include <algorithm>
#include <array>

namespace emulator {

namespace {

// From the public host code of CANN 9.1 (ops-math, ops-nn), products A2 and A3: kernels that exist only on the AICPU,
// and kernels without 64-bit integers on the AI core. The list is incomplete: it lacks operators that no test calls, and
// conditions that depend on shapes.
constexpr std::array ALWAYS = {"aclnnLeftShift", "aclnnRightShift", "aclnnSearchSorted"};
constexpr std::array WITH_INT64 = {"aclnnFloorDivide",        "aclnnFloorDivides",      "aclnnInplaceFloorDivide",
                                   "aclnnInplaceFloorDivides", "aclnnScatter",           "aclnnInplaceScatter",
                                   "aclnnScatterValue",       "aclnnInplaceScatterValue", "aclnnCumsum"};

template <class Names>
bool among(const Names& names, const std::string& name) {
    return std::any_of(names.begin(), names.end(), [&](const char* one) { return name == one; });
}

}  // namespace

// torch_npu converts arguments from the last to the first, so the last data type belongs to the first tensor argument.
// aclnnCumsum first casts its input to the output's type.
bool runs_on_aicpu(const std::string& name, const std::vector<at::ScalarType>& dtypes) {
    if (among(ALWAYS, name)) return true;
    if (!among(WITH_INT64, name) || dtypes.empty()) return false;
    return (name == "aclnnCumsum" ? dtypes.front() : dtypes.back()) == at::kLong;
}

}  // namespace emulator
