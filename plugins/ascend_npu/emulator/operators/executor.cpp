#include "executor.h"

#include "../runtime/log.h"
#include "../runtime/memory.h"
#include "../runtime/stream.h"
#include "aicpu.h"

namespace emulator {

static thread_local Operands collecting;
static thread_local uint64_t wanted = 0;

void touched(const aclTensor& tensor) {
    if (tensor.span() > 0) collecting.ranges.emplace_back(tensor.start(), tensor.span());
    collecting.dtypes.push_back(tensor.dtype);
}

void needs_workspace(uint64_t bytes) { wanted = bytes; }

static std::string lost(const Operands& operands) {
    for (auto [start, bytes] : operands.ranges)
        if (auto why = outside_device(start, bytes); !why.empty()) return "a tensor's " + why;
    return "";
}

int prepare(const char* name, uint64_t* size, aclOpExecutor** executor, const std::function<Work()>& make) {
    auto operands = std::exchange(collecting, {});
    wanted = 0;
    try {
        if (auto why = lost(operands); !why.empty()) throw Rejected(why);
        auto work = make();
        *executor = new aclOpExecutor{name, std::move(work), std::move(operands), wanted};
    } catch (const std::exception& error) {
        return fail(OPERATOR_REJECTED, std::string(name) + " rejects its arguments: " + error.what());
    }
    *size = wanted;
    log_call(std::string(name) + "GetWorkspaceSize");
    if (runs_on_aicpu(name, (*executor)->operands.dtypes)) log_call(std::string("AICPU ") + name);
    return OK;
}

static Step perform(const aclOpExecutor& operation) {
    if (auto why = lost(operation.operands); !why.empty()) throw std::runtime_error(why);
    operation.work();
    return Step::Done;
}

int launch(const char* name, void* workspace, uint64_t size, aclOpExecutor* executor, Stream* stream) {
    auto* id = stream != nullptr ? stream : default_stream();
    log_call(std::string(name) + " stream " + std::to_string(id->id));
    std::shared_ptr<aclOpExecutor> operation(executor);
    if (operation->workspace > size)
        return fail(PARAM_INVALID, std::string(name) + " needs a workspace of " + std::to_string(operation->workspace) + " bytes, got " + std::to_string(size));
    if (size > 0) operation->operands.ranges.emplace_back(workspace, size);
    return submit(stream, {name, [operation] { return perform(*operation); }});
}

Work into(const aclTensor* out, std::function<at::Tensor()> value) {
    return [target = T(out), value = std::move(value)]() mutable { target.copy_(value()); };
}

}  // namespace emulator

API int aclDestroyAclOpExecutor(aclOpExecutor* executor) { return delete executor, emulator::OK; }
