// C interface of streams and events.
#include "log.h"
#include "machine.h"

using namespace emulator;

static std::string of(Stream* stream) { return " stream " + std::to_string((stream ? stream : default_stream())->id); }

API Status aclrtCreateStream(Stream** stream) {
    *stream = create_stream();
    return OK;
}

API Status aclrtCreateStreamWithConfig(Stream** stream, uint32_t, uint32_t) { return aclrtCreateStream(stream); }
API Status aclrtDestroyStream(Stream* stream) { return destroy_stream(stream); }
API Status aclrtDestroyStreamForce(Stream* stream) { return destroy_stream(stream); }

API Status aclrtStreamGetId(Stream* stream, int32_t* id) {
    *id = (stream ? stream : default_stream())->id;
    return OK;
}

API Status aclrtStreamQuery(Stream* stream, int32_t* status) {
    *status = finished(stream) ? 0 : 1;
    return OK;
}

API Status aclrtSynchronizeStream(Stream* stream) {
    log_call("aclrtSynchronizeStream" + of(stream));
    return synchronize(stream);
}

API Status aclrtSynchronizeStreamWithTimeout(Stream* stream, int32_t) { return aclrtSynchronizeStream(stream); }

API Status aclrtSynchronizeDevice() {
    log_call("aclrtSynchronizeDevice");
    return synchronize_device();
}

API Status aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }

API Status aclrtCreateEventExWithFlag(Event** event, uint32_t) {
    *event = create_event();
    return OK;
}

API Status aclrtCreateEventWithFlag(Event** event, uint32_t flags) { return aclrtCreateEventExWithFlag(event, flags); }
API Status aclrtDestroyEvent(Event* event) { return destroy_event(event); }

API Status aclrtRecordEvent(Event* event, Stream* stream) {
    log_call("record" + of(stream));
    return record(event, stream);
}

API Status aclrtStreamWaitEvent(Stream* stream, Event* event) {
    log_call("wait" + of(stream));
    return wait(event, stream);
}

API Status aclrtQueryEventStatus(Event* event, int32_t* status) {
    *status = finished(event) ? 1 : 0;
    return OK;
}

API Status aclrtQueryEventWaitStatus(Event* event, int32_t* status) {
    *status = finished(event) ? 0 : 1;
    return OK;
}

API Status aclrtSynchronizeEvent(Event* event) {
    log_call("aclrtSynchronizeEvent");
    return synchronize(event);
}

API Status aclrtEventElapsedTime(float*, Event*, Event*) {
    die("aclrtEventElapsedTime was called: the emulator has no clock, so it cannot measure time");
}
