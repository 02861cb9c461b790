#include "stream.h"

#include "capture.h"
#include "log.h"
#include "machine.h"

namespace emulator {

using Lock = std::lock_guard<std::recursive_mutex>;

Stream* create_stream() {
    auto& m = machine();
    Lock lock(m.lock);
    auto* stream = new Stream;
    stream->id = m.next_id++;
    m.streams.insert(stream);
    return stream;
}

Stream* default_stream() {
    auto& m = machine();
    Lock lock(m.lock);
    if (m.standard == nullptr) m.standard = create_stream();
    return m.standard;
}

Status destroy_stream(Stream* stream) {
    auto& m = machine();
    Lock lock(m.lock);
    auto status = synchronize(stream);
    m.streams.erase(stream);
    return status;  // the object is kept: a late call with it must not access freed memory
}

Status submit(Stream* stream, Task task) {
    auto& m = machine();
    Lock lock(m.lock);
    if (stream == nullptr) stream = default_stream();
    if (stream->error != OK) return fail(stream->error, stream->why);
    auto pointer = std::make_shared<Task>(std::move(task));
    if (stream->updating != nullptr) {
        stream->replacement.push_back(pointer);
    } else if (stream->capturing != nullptr) {
        append(stream, pointer);
    } else {
        stream->queue.push_back(pointer);
        m.run_ahead();
    }
    return OK;
}

static Status synchronize_all(const std::function<bool()>& done, Stream* first, Stream* blame) {
    auto& m = machine();
    if (auto status = m.drive(done, first); status != OK) return status;
    if (blame != nullptr && blame->error != OK) return fail(blame->error, blame->why);
    return OK;
}

Status synchronize(Stream* stream) {
    auto& m = machine();
    Lock lock(m.lock);
    if (stream == nullptr) stream = default_stream();
    if (stream->capturing != nullptr) return refuse(stream->capturing, "a stream cannot be synchronised while it captures");
    return synchronize_all([stream] { return stream->queue.empty(); }, stream, stream);
}

Status synchronize_device() {
    auto& m = machine();
    Lock lock(m.lock);
    if (auto* model = strictest_capture()) return refuse(model, "the device cannot be synchronised while a stream captures");
    auto idle = [&m] {
        for (auto* stream : m.streams)
            if (!stream->queue.empty()) return false;
        return true;
    };
    if (auto status = synchronize_all(idle, nullptr, nullptr); status != OK) return status;
    for (auto* stream : m.streams)
        if (stream->error != OK) return fail(stream->error, stream->why);
    return OK;
}

bool finished(Stream* stream) {
    Lock lock(machine().lock);
    return (stream == nullptr ? default_stream() : stream)->queue.empty();
}

}  // namespace emulator
