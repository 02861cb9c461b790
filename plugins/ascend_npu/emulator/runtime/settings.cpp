#include "settings.h"

#include <cstdlib>

namespace emulator {

static size_t number(const char* name, size_t otherwise) {
    const char* text = std::getenv(name);
    return text == nullptr || *text == 0 ? otherwise : std::strtoull(text, nullptr, 10);
}

static std::string words(const char* name, const char* otherwise) {
    const char* text = std::getenv(name);
    return text == nullptr || *text == 0 ? otherwise : text;
}

static Settings read() {
    Settings found;
    const char* seed = std::getenv("DRAFTMARK_NPU_SEED");
    found.fuzz = seed != nullptr && *seed != 0;
    found.seed = number("DRAFTMARK_NPU_SEED", 0);
    found.hbm_bytes = number("DRAFTMARK_NPU_HBM_MIB", 65536) << 20;
    found.soc = words("DRAFTMARK_NPU_SOC", "Ascend910B3");
    found.cann = words("DRAFTMARK_NPU_CANN", "9.1.0");
    found.log = number("DRAFTMARK_NPU_LOG", 0) != 0;
    return found;
}

const Settings& settings() {
    static const Settings found = read();
    return found;
}

}  // namespace emulator
