// Events. A wait waits for the latest record that was enqueued before it.
#include "capture.h"
#include "log.h"
#include "machine.h"

namespace emulator {

using Lock = std::lock_guard<std::recursive_mutex>;

Event* create_event() {
    auto& m = machine();
    Lock lock(m.lock);
    auto* event = new Event;
    m.events.insert(event);
    return event;
}

Status destroy_event(Event* event) {
    Lock lock(machine().lock);
    machine().events.erase(event);  // the object is kept, because queued tasks may still use it
    return OK;
}

Status record(Event* event, Stream* stream) {
    Lock lock(machine().lock);
    if (stream == nullptr) stream = default_stream();
    if (stream->capturing != nullptr) {
        event->captured = stream->capturing;  // a fork or join inside the capture, ordered by the capture
        return OK;
    }
    event->captured = nullptr;
    auto asked = ++event->asked;
    return submit(stream, {"record of an event", [event, asked] {
                               event->done = std::max(event->done, asked);
                               return Step::Done;
                           }});
}

Status wait(Event* event, Stream* stream) {
    Lock lock(machine().lock);
    if (stream == nullptr) stream = default_stream();
    if (event->captured != nullptr && stream->capturing == nullptr) return join(event->captured, stream);
    if (event->captured != nullptr && event->captured == stream->capturing) return OK;
    if (stream->capturing != nullptr)
        return refuse(stream->capturing, "a capturing stream cannot wait for an event recorded outside the capture");
    auto asked = event->asked;
    return submit(stream, {"wait for an event",
                           [event, asked] { return event->done >= asked ? Step::Done : Step::Blocked; },
                           [] { return std::string("an event that another stream records"); }});
}

bool finished(Event* event) {
    Lock lock(machine().lock);
    return event->done >= event->asked;
}

Status synchronize(Event* event) {
    Lock lock(machine().lock);
    if (event->captured != nullptr) return refuse(event->captured, "a captured event cannot be synchronised");
    if (auto* model = strictest_capture()) return refuse(model, "an event cannot be synchronised while a stream captures");
    // The predicate takes no lock: it runs on the machine's thread while this thread holds the lock.
    return machine().drive([event] { return event->done >= event->asked; }, nullptr);
}

}  // namespace emulator
