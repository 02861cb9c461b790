#include "aicpu.h"

#include <algorithm>
#include <array>

namespace emulator {

namespace {

// From the public host code of CANN 9.1 (ops-math, ops-nn), products A2 and A3: kernels that exist on the AICPU alone,
// and kernels whose AI core half takes no 64-bit integers. Not a complete list: operators that nothing here calls are
// missing, and so are conditions that hang on shapes.
constexpr std::array ALWAYS = {"aclnnLeftShift", "aclnnRightShift", "aclnnSearchSorted"};
constexpr std::array WITH_INT64 = {"aclnnFloorDivide",        "aclnnFloorDivides",      "aclnnInplaceFloorDivide",
                                   "aclnnInplaceFloorDivides", "aclnnScatter",           "aclnnInplaceScatter",
                                   "aclnnScatterValue",       "aclnnInplaceScatterValue", "aclnnCumsum"};

template <class Names>
bool among(const Names& names, const std::string& name) {
    return std::any_of(names.begin(), names.end(), [&](const char* one) { return name == one; });
}

}  // namespace

// torch_npu converts arguments from the last to the first: the first tensor argument is the last data type. A sum over
// something else is cast to the output's type first.
bool runs_on_aicpu(const std::string& name, const std::vector<at::ScalarType>& dtypes) {
    if (among(ALWAYS, name)) return true;
    if (!among(WITH_INT64, name) || dtypes.empty()) return false;
    return (name == "aclnnCumsum" ? dtypes.front() : dtypes.back()) == at::kLong;
}

}  // namespace emulator
