// Settings from environment variables, read once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace emulator {

struct Settings {
    bool fuzz = false;          // DRAFTMARK_NPU_SEED set: run streams ahead and in an order drawn from `seed`
    uint64_t seed = 0;
    size_t hbm_bytes = 0;       // DRAFTMARK_NPU_HBM_MIB, 65536 by default: limit of aclrtMalloc
    std::string soc;            // DRAFTMARK_NPU_SOC, Ascend910B3 by default: an Atlas A2, the family of the operator pages
    std::string cann;           // DRAFTMARK_NPU_CANN, 9.1.0 by default: the release for torch_npu 2.13
    bool log = false;           // DRAFTMARK_NPU_LOG=1: keep the call log from the start
};

const Settings& settings();

}  // namespace emulator
