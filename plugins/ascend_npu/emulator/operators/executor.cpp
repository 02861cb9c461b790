#include "executor.h"

#include "../runtime/log.h"
#include "../runtime/memory.h"
#include "../runtime/stream.h"

namespace emulator {

static thread_local Operands collecting;

void touched(const aclTensor& tensor) {
    if (tensor.span() > 0) collecting.ranges.emplace_back(tensor.start(), tensor.span());
}

static std::string lost(const Operands& operands) {
    for (auto [start, bytes] : operands.ranges)
        if (auto why = outside_device(start, bytes); !why.empty()) return "a tensor's " + why;
    return "";
}

int prepare(const char* name, uint64_t* size, aclOpExecutor** executor, const std::function<Work()>& make, uint64_t workspace) {
    auto operands = std::exchange(collecting, {});
    try {
        if (auto why = lost(operands); !why.empty()) throw Rejected(why);
        *executor = new aclOpExecutor{name, make(), std::move(operands), workspace};
    } catch (const std::exception& error) {
        return fail(OPERATOR_REJECTED, std::string(name) + " rejects its arguments: " + error.what());
    }
    *size = workspace;
    log_call(std::string(name) + "GetWorkspaceSize");
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
