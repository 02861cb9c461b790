// Waits for and writes of a word of device memory. torch_npu's external events use them: record writes 1, wait waits
// for 1 and writes 0.
#include "log.h"
#include "machine.h"
#include "memory.h"

using namespace emulator;

static std::string of(Stream* stream) { return " stream " + std::to_string((stream ? stream : default_stream())->id); }

static bool holds(uint64_t found, uint64_t value, Until until) {
    switch (until) {
        case Until::AtLeast: return static_cast<int64_t>(found - value) >= 0;
        case Until::Equal: return found == value;
        case Until::AnyBit: return (found & value) != 0;
        default: return ~(found | value) != 0;
    }
}

API Status aclrtValueWait(uint64_t* address, uint64_t value, Until until, Stream* stream) {
    log_call("wait external" + of(stream));
    if (auto why = outside_device(address, 8); !why.empty()) return fail(PARAM_INVALID, "aclrtValueWait: " + why);
    return submit(stream, {"wait for an external event",
                           [=] { return holds(*address, value, until) ? Step::Done : Step::Blocked; },
                           [] { return std::string("an external event that was never recorded"); }});
}

API Status aclrtValueWrite(uint64_t* address, uint64_t value, uint32_t, Stream* stream) {
    log_call((value != 0 ? "record external" : "reset external") + of(stream));
    if (auto why = outside_device(address, 8); !why.empty()) return fail(PARAM_INVALID, "aclrtValueWrite: " + why);
    return submit(stream, {value != 0 ? "record of an external event" : "reset of an external event", [=] {
                               *address = value;
                               return Step::Done;
                           }});
}
