// C interface of captured models and task groups.
#include "capture.h"
#include "log.h"
#include "machine.h"

using namespace emulator;

static std::string of(Stream* stream) { return " stream " + std::to_string((stream ? stream : default_stream())->id); }

API Status aclmdlRICaptureBegin(Stream* stream, int mode) {
    log_call("capture begin" + of(stream));
    return begin_capture(stream, static_cast<Mode>(mode));
}

API Status aclmdlRICaptureEnd(Stream* stream, Model** model) {
    log_call("capture end" + of(stream));
    return end_capture(stream, model);
}

API Status aclmdlRICaptureGetInfo(Stream* stream, int* status, Model** model) {
    auto* capturing = (stream ? stream : default_stream())->capturing;
    *status = capturing == nullptr ? 0 : capturing->invalid.empty() ? 1 : 2;
    if (model != nullptr) *model = capturing;
    return OK;
}

API Status aclmdlRICaptureThreadExchangeMode(int* mode) {
    *mode = static_cast<int>(exchange_mode(static_cast<Mode>(*mode)));
    return OK;
}

API Status aclmdlRIGetId(Model* model, uint32_t* id) {
    *id = model->id;
    return OK;
}

API Status aclmdlRIExecuteAsync(Model* model, Stream* stream) {
    log_call("replay model " + std::to_string(model->id) + of(stream));
    return execute(model, stream);
}

API Status aclmdlRIDestroy(Model*) { return OK; }  // kept, because queued replays may still use it

API Status aclmdlRICaptureTaskGrpBegin(Stream* stream) {
    log_call("group begin" + of(stream));
    return begin_group(stream);
}

API Status aclmdlRICaptureTaskGrpEnd(Stream* stream, Group** group) {
    log_call("group end" + of(stream));
    return end_group(stream, group);
}

API Status aclmdlRICaptureTaskUpdateBegin(Stream* stream, Group* group) {
    log_call("update begin" + of(stream));
    return begin_update(stream, group);
}

API Status aclmdlRICaptureTaskUpdateEnd(Stream* stream) {
    log_call("update end" + of(stream));
    return end_update(stream);
}
